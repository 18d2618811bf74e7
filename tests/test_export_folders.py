"""Where exports are written: nothing of anybody else is lost, and a model stays as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from eventful import Config, TopR
from eventful.errors import ArtefactError, UnsupportedError
from eventful.export import export, exportable
from eventful.export.folder import replacing_folder
from eventful.export.manifest import NAME, is_export
from exports import tiny_vit

pytest.importorskip("onnxscript")
FRAME = torch.rand(1, 3, 64, 64)


def sealed(folder: Path, **content: object) -> Path:
    """A folder with a manifest whose checksum is right, and the files it lists."""
    from eventful import files
    from eventful.export.manifest import _canonical

    folder.mkdir()
    names = ("dense.onnx", "layout.txt")
    for name in names:
        (folder / name).write_text(name)
    about = {"files": dict.fromkeys(names, "0"), **content}
    text = files.digest([_canonical(about)])
    (folder / NAME).write_text(json.dumps({"format": 1, "checksum": text, **about}))
    return folder


def test_only_files_of_an_export_are_replaced(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "ours")
    assert is_export(folder)
    (folder / "layout.txt").unlink()
    assert is_export(folder), "what is damaged can be exported again"
    (folder / "thesis.tex").write_text("years of work")
    assert not is_export(folder)
    with pytest.raises(ArtefactError, match="Name another folder"):
        export(tiny_vit(), FRAME, folder)
    assert (folder / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("text", ["{}", "[]", '{"name": "an extension"}', "\xff", "[" * 99999])
def test_a_manifest_of_another_program_protects_its_folder(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(ArtefactError, match="Name another folder"):
        export(tiny_vit(), FRAME, tmp_path)
    assert (tmp_path / NAME).exists()


def test_folders_and_links_in_a_folder_protect_it(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "ours")
    (folder / "more").mkdir()
    assert not is_export(folder)


def test_a_new_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "ours")
    with replacing_folder(folder, is_export) as made:
        (made / "new").write_text("new")
        assert (folder / NAME).exists()
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_what_fails_leaves_the_old_folder(tmp_path: Path, monkeypatch) -> None:
    folder = sealed(tmp_path / "ours")
    with pytest.raises(RuntimeError), replacing_folder(folder, is_export):
        raise RuntimeError
    assert is_export(folder)
    moved = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if target == folder and path.parent.name.startswith(".") and path.name == "ours":
            raise OSError(28, "No space left on device")
        return moved(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ArtefactError, match="No space left"), replacing_folder(folder, is_export):
        pass
    assert is_export(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_files_that_came_in_the_meantime_stay(tmp_path: Path) -> None:
    folder = tmp_path / "new"

    def late() -> None:
        with replacing_folder(folder, is_export):
            folder.mkdir()
            (folder / "notes.txt").write_text("mine")

    with pytest.raises(ArtefactError, match="did not write"):
        late()
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_link_stays_and_its_folder_is_replaced(tmp_path: Path) -> None:
    folder, link = sealed(tmp_path / "ours"), tmp_path / "link"
    link.symlink_to(folder)
    with replacing_folder(link, is_export) as made:
        (made / "new").write_text("new")
    assert link.is_symlink()
    assert (folder / "new").exists()


@pytest.mark.parametrize("name", ["/proc/foo/x", "/dev/null/x", "x" * 300, "file"])
def test_folders_that_cannot_be_written_are_refused_first(name: str, tmp_path: Path) -> None:
    from eventful.export.triton import export_triton

    (tmp_path / "file").write_text("a file")
    told: list[str] = []
    for write in (export, export_triton):
        options = {"r": 4} if write is export_triton else {}
        folder = tmp_path / name / "y" if write is export_triton and name == "file" else name
        with pytest.raises(ArtefactError, match="Name another folder"):
            write(
                tiny_vit(), FRAME, tmp_path / folder, tick=lambda *what: told.append(str(what)),
                **options,
            )  # fmt: skip
    assert not told, "the graphs were traced first"


def test_a_triton_model_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    from eventful.export.triton import export_triton

    other = tmp_path / "eventful"
    (other / "1").mkdir(parents=True)
    (other / "1" / "model.onnx").write_text("theirs")
    (other / "config.pbtxt").write_text('name: "eventful"\nbackend: "onnxruntime"')
    with pytest.raises(ArtefactError, match="Name another folder"):
        export_triton(tiny_vit(), FRAME, tmp_path, r=4)
    assert (other / "1" / "model.onnx").read_text() == "theirs"


@pytest.mark.parametrize("refused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_modules_stay_in_their_modes(refused: bool, tmp_path: Path) -> None:
    from eventful.export.triton import export_triton

    model = tiny_vit(depth=1).train()
    model.blocks.eval()
    modes = [module.training for module in model.modules()]
    config = Config.exact(TopR(4)) if refused else exportable(TopR(4))
    for write in (export, export_triton):
        more = {"r": 4} if write is export_triton else {"r": (4,)}
        try:
            write(model, FRAME, tmp_path / os.urandom(4).hex(), config=config, **more)
        except UnsupportedError:
            assert refused
        assert [module.training for module in model.modules()] == modes
