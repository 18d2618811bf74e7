"""What the wheel and the source distribution contain, and that the wheel works by itself."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import eventful
from eventful.extras import TABLE

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Both, built by the backend alone: `python -m build` would add seconds."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    [path] = built.glob("*.whl")
    assert path.name == f"eventful_transformers-{eventful.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def source(built) -> set[str]:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def files(folder: Path, pattern: str = "*") -> set[str]:
    """Files of a folder by their path under the checkout."""
    return {
        str(path.relative_to(ROOT))
        for path in folder.rglob(pattern)
        if path.is_file() and not {"__pycache__", ".ruff_cache"} & set(path.parts)
    }


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel):
    names = set(wheel.namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == {name.removeprefix("src/") for name in files(SOURCE)}
    assert "eventful/py.typed" in names
    assert "eventful/models/weights/detector.safetensors" in names
    assert any(name.endswith(".toml") for name in names)


def test_weights_have_cards_and_these_are_licence_files(wheel):
    names = wheel.namelist()
    weights = [name for name in names if name.endswith(".safetensors")]
    assert weights
    for name in weights:
        card = name.replace(".safetensors", ".md")
        [licence] = [other for other in names if other.endswith(f"/licenses/src/{card}")]
        assert "| licence | MIT" in wheel.read(licence).decode()
    for file in ("LICENSE", "NOTICE"):
        [licence] = [name for name in names if name.endswith(f".dist-info/licenses/{file}")]
        assert wheel.read(licence) == (ROOT / file).read_bytes()


def test_the_metadata(wheel):
    [path] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    about = Parser().parsestr(wheel.read(path).decode())
    assert about["Version"] == eventful.__version__
    assert about["License-Expression"] == "MIT"
    required = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(required) == ["numpy", "safetensors", "torch>=2.11"]
    assert {extra.name for extra in TABLE} <= set(about.get_all("Provides-Extra"))


def test_the_source_distribution_has_what_the_tests_need(source):
    for folder in ("src", "tests", "docs", "benchmarks", "scripts", "examples"):
        wanted = files(ROOT / folder) if (ROOT / folder).is_dir() else set()
        assert wanted <= source, f"{folder}: {sorted(wanted - source)[:5]}"
    single = {"Makefile", "mkdocs.yml", "constraints.txt", "pyproject.toml", "README.md"}
    single |= {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "NOTICE"}
    assert single <= source


def test_nothing_of_others_is_packed(wheel, source):
    """Videos, photographs and weights for measuring are never in it."""
    # Charts, pictures of the generated world, and a clip of it.
    clips = "eventful/pipeline/clips"
    allowed = {"docs/images", clips, f"src/{clips}"}
    for name in {*wheel.namelist(), *source}:
        path = Path(name)
        if path.suffix.lower() in {".mp4", ".avi", ".mov", ".ts", ".jpg", ".jpeg", ".png", ".webp"}:
            assert str(path.parent) in allowed, name
        if path.suffix in {".pt", ".pth", ".pkl", ".onnx", ".safetensors"}:
            assert path.parent.name in {"weights", "golden"}, name
        assert not {"assets-local", "img1", "gt"} & set(path.parts), name


@pytest.mark.slow
def test_the_wheel_works_in_a_new_environment(tmp_path):
    """Needs the package index, or a folder of wheels that pip is set up to use; two minutes."""
    command = [sys.executable, str(ROOT / "scripts" / "wheel.py"), "--out", str(tmp_path), "--demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for line in ("installed: ok", "streams: ok", "commands: ok", "works in a new environment"):
        assert line in done.stdout
