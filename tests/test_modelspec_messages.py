"""Names, sizes and files that mean no model: one message of this package, never a traceback."""

from __future__ import annotations

import json
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eventful
from commands import here  # noqa: F401
from eventful.errors import CheckpointError, ConfigError, UnsupportedError
from eventful.modelspec.opening import RandomWeightsWarning, open_named
from eventful.modelspec.size import parse_size
from eventful.pipeline import first_step
from eventful.pipeline.first_step import refusal

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
VIT = {
    "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**VIT, **changes}))
    return path


def quietly(name: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RandomWeightsWarning)
        return open_named(name, **options).model


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf:-a/b"], "hf:-a/b is neither a path that exists nor a name on the hub"),
        (["hf:a/b--c"], "hf:a/b--c is neither"),
        (["hf:a/.."], "hf:a/.. is neither"),
        (["hf:ViTPreTrainedModel"], "no model 'ViTPreTrainedModel'"),
        (["hf:ViTImageProcessor"], "no model 'ViTImageProcessor'"),
        (["vit_tiny_patch16_224", "--size", "99999999"], "more than 89,478,485 pixels"),
        (["hf:ViTModel", "--size", "40000x40000"], "the limit for pictures"),
        (["torchvision:maxvit_t", "--size", "300"], "not divisible"),
        (["vit_tiny_patch16_224", "--weights", "/nonexistent"], "/nonexistent is not there"),
        (["hf:~/no-such-folder"], f"{Path.home()}/no-such-folder is not there"),
    ],
)
def test_a_command_ends_with_one_message(words: list[str], message: str, here: Run) -> None:  # noqa: F811
    done = here("inspect", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_whatever_a_library_raises_becomes_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OverflowError("inside the library\nsecond line")

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(UnsupportedError, match=r"cannot be made \(OverflowError: inside the lib"):
        open_named("timm:vit_tiny_patch16_224")


def test_a_lack_of_memory_ends_a_command_with_a_message(
    monkeypatch: pytest.MonkeyPatch, here: Run  # noqa: F811
) -> None:  # fmt: skip
    from eventful.cli import inspect as command

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 3 bytes\nmore")

    monkeypatch.setattr(command, "inspect", fail)
    done = here("inspect", "vit_tiny_patch16_224")
    assert done.returncode == 2
    assert "The memory does not suffice. Give a smaller --size" in done.stderr
    assert done.stderr.count("\n") == 1


def test_sizes_within_the_limit_of_pictures_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_size("9000") == 9000
    monkeypatch.setenv("EVENTFUL_MAX_PIXELS", "100")
    assert parse_size("10") == 10
    with pytest.raises(ConfigError, match="EVENTFUL_MAX_PIXELS"):
        parse_size("10x11")


def test_torchvision_reads_names_in_any_case_and_keeps_the_size() -> None:
    pytest.importorskip("torchvision")
    for name in ("torchvision:vit_b_32", "torchvision:ViT_B_32", "torchvision:VIT_B_32"):
        assert open_named(name, size=64, weightless=True).model.image_size == 64


# Folders and names of transformers.


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert type(quietly("hf:~/mine")).__name__ == "ViTModel"


def test_a_name_of_transformers_goes_before_a_folder_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "dinov2")
    folder(tmp_path / "own" / "model")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"For the folder write hf:\./dinov2"):
        made = open_named("hf:dinov2", weightless=True).model
    assert type(made).__name__ == "Dinov2Model"
    assert type(quietly("hf:./dinov2")).__name__ == "ViTModel"
    assert type(quietly("hf:own/model")).__name__ == "ViTModel"  # before the hub


def test_architectures_may_be_one_name(tmp_path: Path) -> None:
    path = folder(tmp_path / "vit", architectures="ViTForImageClassification")
    assert type(quietly(f"hf:{path}")).__name__ == "ViTForImageClassification"


@pytest.mark.parametrize("named", ["ViTConfig", "pipeline", "AutoModel", "ViTPreTrainedModel"])
def test_architectures_must_name_models(named: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "vit", architectures=[named])
    with pytest.raises(UnsupportedError, match=f"names {named}, which is no class of models"):
        open_named(f"hf:{path}")


# Functions, weights, steps.


def test_a_module_that_fails_to_import_another_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_maker_of_a_user.py").write_text("import model_maker_of\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnsupportedError, match="No module named 'model_maker_of'"):
        open_named("model_maker_of_a_user:make")
    with pytest.raises(UnsupportedError, match=r"There is no module 'model_maker_of_a\.b'"):
        open_named("model_maker_of_a.b:make")


def test_inspect_says_whether_weights_fit(tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    torch.save(timm.create_model("vit_tiny_patch16_224", depth=1).state_dict(), file)
    with pytest.raises(CheckpointError, match="lacks 132 tensors"):
        open_named("vit_tiny_patch16_224", weights=str(file), weightless=True)
    torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_named("vit_tiny_patch16_224", weights=str(file), weightless=True)


class Failing(nn.Module):
    """A ViT with a part that fails ahead of, or behind, its blocks, or in a step alone."""

    def __init__(self, in_steps: bool) -> None:
        super().__init__()
        self.vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=48)
        self.in_steps = in_steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.vit.forward_features(x)
        if not self.in_steps or "forward" in vars(self.vit.blocks[0]):
            raise KeyError("behind the blocks")
        return tokens


@pytest.mark.parametrize(
    ("in_steps", "message"),
    [(False, "the model itself fails on it (KeyError"), (True, "a step of the converted model")],
)
def test_a_trial_step_says_what_fails(in_steps: bool, message: str) -> None:
    said = refusal(Failing(in_steps).eval(), (32, 32), 32)
    assert said is not None
    assert message in said


def test_a_trial_step_says_what_an_adapter_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise eventful.errors.Mismatch("its tokens are too many")

    monkeypatch.setattr(first_step, "_step", fail)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=48).eval()
    assert refusal(model, (32, 32), 32) == "its tokens are too many"


def test_a_call_that_runs_no_block_says_where_the_blocks_are() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    stream = eventful.Stream(eventful.convert(Outer().eval()))
    with pytest.raises(UnsupportedError, match="no converted block; they are in tower"):
        stream(torch.rand(1, 3, 32, 32))
