"""Models by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import eventful
from eventful.errors import CheckpointError, ConfigError
from eventful.models import shipped
from eventful.models.vitdet import ViTDet
from eventful.models.vivit import ViViT, prepare
from eventful.paper.data import open_dataset
from eventful.video.world import ACTIONS, CLASSES, World

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_detector():
    model = eventful.load("detector")
    assert isinstance(model, ViTDet)
    assert not model.training
    assert model.classes == CLASSES
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert 3.5e6 < sum(p.numel() for p in model.parameters()) < 4.5e6
    assert shipped.weights_of("detector").stat().st_size < 12e6


def test_the_actions():
    model = eventful.load("actions")
    assert isinstance(model, ViViT)
    assert not model.training
    assert model.classes == ACTIONS
    assert shipped.weights_of("actions").stat().st_size < 12e6
    clips = open_dataset("world:actions?videos=4&exposures=1", "val")
    right = 0
    for video in clips:
        pixels = prepare(video.frames.read(range(32)).permute(0, 2, 3, 1))
        with torch.no_grad():
            right += int(model(pixels).argmax()) == video.label
    assert right >= 3


def test_each_file_has_a_card():
    folder = shipped.weights_of("detector").parent
    for file in folder.glob("*.safetensors"):
        card = file.with_suffix(".md").read_text()
        for word in ("data", "schedule", "score", "command", "licence"):
            assert f"| {word} |" in card, f"{file.stem}: {word}"


def test_all_tokens_is_dense():
    model = eventful.load("detector")
    frame, placement = model.prepare(World(3, frames=1, exposures=1).read([0])[0])
    with torch.no_grad():
        (dense,) = model(frame, [placement])
        stream = eventful.Stream(eventful.convert(model, eventful.Config.fast(eventful.Always())))
        (found,) = stream(frame, [placement])
    assert len(dense)
    assert torch.equal(found.labels, dense.labels)
    assert torch.allclose(found.boxes, dense.boxes, atol=1e-3)


def test_the_page_s_lines(capsys):
    (lines,) = re.findall(r"```python\n(import eventful\nfrom eventful.video.world.*?)```",
                          (DOCS / "models.md").read_text(), re.DOTALL)  # fmt: skip
    exec(compile(lines.replace("frames=20", "frames=2"), "models.md", "exec"), {})
    printed = capsys.readouterr().out
    assert any(name in printed for name in CLASSES)


def test_unknown_names():
    with pytest.raises(ConfigError, match="detector, actions, focus"):
        eventful.load("yolo")


def test_a_file_that_is_not_there():
    with pytest.raises(CheckpointError, match="install the package again"):
        shipped.weights_of("nothing")
