"""Files of weights: every kind is read, nothing in one is run, and the command that converts."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import here  # noqa: F401
from eventful.cli import main, weights
from eventful.errors import CheckpointError
from eventful.models.checkpoints import read_checkpoint
from eventful.models.loading import load_model
from eventful.models.vitdet import ViTDet, ViTDetBackbone
from eventful.models.vivit import ViViT
from test_weights_layouts import (
    SMALL,
    detectron_keys,
    filled,
    vitdet_of_transformers,
    vivit_keys,
)

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}


def written(path: Path, kind: str) -> Path:
    arrays = {key: value.numpy() for key, value in TENSORS.items()}
    if kind == "zip":
        torch.save({"model": TENSORS, "iteration": np.float64(3.0), "note": None}, path)
    elif kind == "legacy":
        torch.save(TENSORS, path, _use_new_zipfile_serialization=False)
    elif kind == "tensors":
        path.write_bytes(pickle.dumps({"model": TENSORS}))
    elif kind == "parallel":
        torch.save({"state_dict": {f"module.{k}": v for k, v in TENSORS.items()}}, path)
    else:
        path.write_bytes(pickle.dumps({"model": arrays, "lr": np.float32(1)}, protocol=int(kind)))
    return path


@pytest.mark.parametrize("kind", ["zip", "legacy", "tensors", "parallel", "2", "4", "5"])
def test_every_kind_of_file_is_read(kind: str, tmp_path: Path) -> None:
    found = read_checkpoint(written(tmp_path / "x.pth", kind))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[key], TENSORS[key]) for key in TENSORS)


@pytest.mark.parametrize(
    "content",
    [
        {"model_ema": TENSORS, "epoch": 3},
        {"ema_state": TENSORS},
        {"ema": {"state_dict": TENSORS}},
        {"model": {"depth": 12}, "state_dict": TENSORS},  # settings, not weights
        {"model": {"_orig_mod." + key: value for key, value in TENSORS.items()}},
        {"module": {"module.model." + key: value for key, value in TENSORS.items()}},
        {"model": TENSORS, "model_ema": {key: value + 1 for key, value in TENSORS.items()}},
        {"model": TENSORS, "ema": {"decay": torch.tensor(0.9)}},
    ],
)
def test_weights_are_found_inside_their_wrappers(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pth")
    found = read_checkpoint(tmp_path / "x.pth")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[key], TENSORS[key]) for key in TENSORS)


@pytest.mark.parametrize("kind", [">f4", ">i8", "longdouble", "f2", "u1", "?"])
def test_numbers_of_every_kind(kind: str, tmp_path: Path) -> None:
    array = np.array([[0, 1], [1, 0]]).astype(kind)
    strange = np.array([None, "text"], object)
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"model": {"a": array, "names": strange}}))
    found = read_checkpoint(path)
    assert list(found) == ["a"]
    assert found["a"].tolist() == array.tolist()


def test_what_a_refused_file_asks_for_is_named(tmp_path: Path) -> None:
    content = {"model": TENSORS, "args": argparse.Namespace(lr=1)}
    torch.save(content, tmp_path / "zip.pth")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(content))
    for path in (tmp_path / "zip.pth", tmp_path / "plain.pkl"):
        with pytest.raises(CheckpointError, match=r"argparse\.Namespace.*Save its weights alone"):
            read_checkpoint(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["zip", "legacy", "tensors", "2", "5"])
def test_bytes_gone_wrong_are_never_more_than_an_error_of_ours(kind: str, tmp_path: Path) -> None:
    whole = written(tmp_path / "x.pth", kind).read_bytes()
    chance = random.Random(0)
    for turn in range(120):
        content = bytearray(whole)
        if turn % 2:
            content = content[: chance.randrange(len(content))]
        else:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (tmp_path / "x.pth").write_bytes(content)
        with contextlib.suppress(CheckpointError):  # a bit inside a number goes unnoticed
            read_checkpoint(tmp_path / "x.pth")


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class HiddenTrap(Trap):
    """The same, inside the bytes of a tensor's storage."""

    def __reduce__(self):
        inner = io.BytesIO()
        torch.save({"x": Trap(self.path)}, inner, _use_new_zipfile_serialization=False)
        return torch.storage._load_from_bytes, (inner.getvalue(),)


@pytest.mark.parametrize("trap", [Trap, HiddenTrap])
@pytest.mark.parametrize("kind", ["pickle", "zip", "legacy"])
def test_nothing_in_a_file_is_run(kind: str, trap: type[Trap], tmp_path: Path) -> None:
    content = {"model": TENSORS, "extra": trap(tmp_path / "sprung")}
    path = tmp_path / "x.pkl"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(CheckpointError, match="not loaded"):
        read_checkpoint(path)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(trap(tmp_path / "sprung")))  # the trap does work
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"PK nothing of the sort", "damaged"),
        (pickle.dumps([1, 2]), "no mapping"),
        (pickle.dumps(np.zeros(3)), "no mapping"),
        (pickle.dumps(torch.zeros(3)), "no mapping"),
        (pickle.dumps({"model": {"a": "text"}}), "no weights"),
        (pickle.dumps({"model": TENSORS})[:-40], "damaged"),
    ],
)
def test_damaged_files(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match="not a file"):
        read_checkpoint(tmp_path / "absent.pth")
    broken = path.rename(tmp_path / "x.safetensors")
    for reader in (read_checkpoint, load_model):
        with pytest.raises(CheckpointError, match="safetensors"):
            reader(broken)


def files_of_every_layout(folder: Path) -> dict[str, tuple[Path, int, type]]:
    """Layout -> its file, how many tensors are in it, and what it makes up."""
    made = {}
    for name, cascade in (("detectron2", True), ("vid", False)):
        given = filled(detectron_keys(7, cascade, SMALL))
        arrays = {key: value.numpy() for key, value in given.items()}
        content = pickle.dumps({"model": arrays, "__author__": "someone"}, protocol=2)
        (folder / f"{name}.pkl").write_bytes(content)
        made[name] = folder / f"{name}.pkl", len(given), ViTDet
    theirs = vitdet_of_transformers(
        use_relative_position_embeddings=True, window_size=4, window_block_indices=[1]
    )
    theirs.save_pretrained(folder / "hf")
    made["transformers"] = folder / "hf/model.safetensors", len(theirs.state_dict()), ViTDetBackbone
    given = filled(vivit_keys(5, 2, True, 64, 2))
    torch.save({"model_state": given, "cfg": "text"}, folder / "vivit.pyth")
    made["vivit"] = folder / "vivit.pyth", len(given), ViViT
    return made


def test_the_command_converts_every_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for layout, (source, count, model) in files_of_every_layout(tmp_path).items():
        for asked in (layout, "auto"):
            target = tmp_path / "new" / layout / f"{asked}.safetensors"
            line = ["eventful", "weights", "convert", str(source), str(target)]
            monkeypatch.setattr("sys.argv", [*line, "--layout", asked, "--json"])
            with pytest.raises(SystemExit) as done:
                main()
            assert done.value.code == 0
            report = json.loads(capsys.readouterr().out)
            assert report["complete"], layout
            assert len(report["used"]) + len(report["unneeded"]) == count
            assert isinstance(load_model(target), model)
    assert set(report["unneeded"]) == {"head.linear2.weight", "head.linear2.bias"}
    assert report["config"]["classes"] == 5


def test_the_command_writes_nothing_that_does_not_fit(tmp_path: Path, here) -> None:
    given = filled(vivit_keys(5, 2, True, 64, 2))
    given["head.stranger"] = torch.zeros(1)
    lost = given.pop("backbone.norm.bias")
    torch.save({"model_state": given}, tmp_path / "in.pth")
    target = tmp_path / "out.safetensors"
    done = here("weights", "convert", tmp_path / "in.pth", target)
    assert done.returncode == 2
    assert "unexpected in the file: head.stranger" in done.stderr
    assert "missing from the file: spatial.norm.bias" in done.stderr
    assert "Traceback" not in done.stderr
    assert not target.exists()
    partly = here("weights", "convert", tmp_path / "in.pth", target, "--partial")
    assert partly.returncode == 0
    assert "unexpected in the file: head.stranger" in partly.stdout
    assert target.exists()
    with pytest.raises(CheckpointError, match=r"missing from the file: spatial\.norm\.bias"):
        load_model(target)
    assert len(lost)


def test_the_command_says_what_it_cannot_do(tmp_path: Path) -> None:
    torch.save(filled(vivit_keys(5, 2, True, 64, 2)), tmp_path / "in.pth")
    for target, layout, message in (
        ("out.pth", "auto", "should end in .safetensors"),
        ("out.safetensors", "caffe", "those known: detectron2"),
        ("out.safetensors", "vid", "sizes cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=message):
            weights.convert(tmp_path / "in.pth", tmp_path / target, layout, False, False)
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]
