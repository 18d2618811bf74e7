"""Every script in examples/ runs, at a small size, and does what its first line says."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import videos
from eventful.policies import registry
from eventful.surgery import adapters
from eventful.surgery.libraries import load

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
VIT = ("--model", "test_vit", "--size", "32")  # two blocks, patches of 16 pixels

pytest.importorskip("av")
pytest.importorskip("timm")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs a script here, where torch is loaded already, and gives what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapters, "_ADAPTERS", list(adapters._ADAPTERS))
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    def script(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return script


def test_features_of_a_camera(run, tmp_path: Path) -> None:
    video = videos.pan(tmp_path / "street.mp4", 5, step=(2, 2))
    shown = run("features_of_a_camera.py", video, *VIT, "--frames", 4)
    assert "4 frames: features.safetensors" in shown
    kept = load_file(tmp_path / "features.safetensors")
    assert kept["features"].shape[0] == len(kept["seconds"]) == 4
    assert kept["seconds"].tolist() == pytest.approx([0, 0.04, 0.08, 0.12])
    assert not kept["features"][0].equal(kept["features"][3])


def test_many_cameras_go_on_without_those_that_fail(run, tmp_path: Path) -> None:
    long, short = (videos.pan(tmp_path / f"{n}.mp4", n, step=(1, 1)) for n in (5, 2))
    images = tmp_path / "images"
    images.mkdir()
    for t in range(2):
        load("PIL.Image").new("RGB", (40, 40)).save(images / f"{t}.png")
    (images / "2.png").write_bytes((images / "1.png").read_bytes()[:24] + b"?" * 20)
    shown = run("many_cameras.py", long, "none.mp4", short, images, *VIT)
    assert "camera 1 is left out: none.mp4 is not there" in shown
    assert "step 1: 3 cameras" in shown
    assert re.search(r"camera 2 ended\n.*step 3: 1 cameras", shown, re.DOTALL)
    assert "step 5: 1 cameras" in shown
    assert "9 frames: " in shown


def test_a_camera_that_breaks_is_left(run, tmp_path: Path, monkeypatch) -> None:
    long, other = (videos.pan(tmp_path / f"{n}.mp4", n, step=(1, 1)) for n in (4, 3))
    monkeypatch.setattr("eventful.read", breaking(other))
    shown = run("many_cameras.py", long, other, *VIT, "--frames", 3)
    assert "camera 1 failed: the cable is out" in shown
    assert re.findall(r"step (\d): (\d) cameras", shown) == [("1", "2"), ("2", "1"), ("3", "1")]


def breaking(path: Path):
    """`eventful.read`, of which one source fails after its first frame."""
    import eventful
    from eventful.errors import SourceError

    read = eventful.read

    def frames(reader):
        yield next(iter(reader))
        raise SourceError("the cable is out")

    def opened(source, *arguments, **options):
        reader = read(source, *arguments, **options)
        return frames(reader) if str(source) == str(path) else reader

    return opened


@pytest.mark.parametrize("budget", [("--error", "0.2"), ("--ms", "500")])
def test_detections_with_a_budget(run, tmp_path: Path, budget) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes = {"image_size": [64, 96], "patch_size": 16, "num_detection_tokens": 5}
    transformers.YolosConfig(**small, **sizes, intermediate_size=48).save_pretrained("yolos")
    video = videos.pan(tmp_path / "street.mp4", 5, step=(2, 2))
    torch.manual_seed(0)
    words = ("--model", "yolos", "--random", "--size", 64, 96, "--score", 0, "--frames", 4)
    shown = run("detections_with_a_budget.py", video, *words, *budget)
    assert shown.count("5 objects") == 4
    assert shown.count("LABEL_") == 20
    assert f"asked {float(budget[1]):g} {'error' if budget[0] == '--error' else 'ms'}" in shown


def test_own_model_own_policy(run) -> None:
    shown = run("own_model_own_policy.py", "--frames", 4)
    assert shown.count("StepRecord(1 stream") == 4
    assert "100% of the operations" in shown.splitlines()[0]  # the first frame, as a whole
    saved = float(re.search(r"([\d.]+)% of the operations saved", shown)[1])
    assert saved > 40


def test_every_script_is_listed_and_short() -> None:
    index, readme = (ROOT / "docs/index.md").read_text(), (ROOT / "README.md").read_text()
    assert len(SCRIPTS) == 4
    for script in SCRIPTS:
        text = script.read_text()
        assert f"(../examples/{script.name})" in index
        assert f"(examples/{script.name})" in readme
        assert f"python examples/{script.name}" in text
        assert len(text.splitlines()) <= 90, script.name
