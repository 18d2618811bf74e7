"""A model of the user's own in a file: written, loaded by its path, evaluated by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import eventful
import tiny_models
from commands import here
from eventful.errors import CheckpointError, ConfigError
from eventful.models.vitdet import ViTDet
from eventful.models.vitdet.backbone import ViTDetBackbone
from eventful.video.world import CLASSES

__all__ = ["here"]  # a fixture
STREET = "world:street?videos=1&frames=2&size=64x64"


def test_a_model_of_ones_own_is_saved_loaded_and_evaluated(tmp_path: Path, here) -> None:
    model = tiny_models.detector(classes=len(CLASSES))
    file = tmp_path / "mine.safetensors"
    eventful.save_model(model, file, classes=CLASSES)
    loaded = eventful.load(str(file))
    assert isinstance(loaded, ViTDet)
    assert not loaded.training
    assert loaded.config == model.config
    assert loaded.classes == tuple(CLASSES)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    done = here("evaluate", "vitdet", "--data", STREET, "--weights", file, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["frames"] == 2  # nothing else is on stdout
    assert "base-model (1 video)" in done.stderr.splitlines()


def test_a_bare_state_dict_names_what_to_call(tmp_path: Path, here) -> None:
    """`weights convert` is for published files, and refuses a model of this package."""
    file = tmp_path / "bare.safetensors"
    save_file(tiny_models.detector().state_dict(), file)
    done = here("evaluate", "vitdet", "--data", STREET, "--weights", file)
    assert done.returncode == 2
    assert "eventful.save_model(model, path)" in " ".join(done.stderr.split())
    done = here("weights", "convert", file, tmp_path / "out.safetensors")
    assert done.returncode == 2
    assert "eventful.save_model(model, path)" in " ".join(done.stderr.split())
    with pytest.raises(CheckpointError, match=r"eventful\.save_model"):
        eventful.load(file)


def test_a_converted_model_is_saved_as_what_it_was(tmp_path: Path) -> None:
    model = tiny_models.detector()
    eventful.save_model(eventful.convert(model), tmp_path / "a.safetensors")
    state = eventful.load(tmp_path / "a.safetensors").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    eventful.save_model(model.backbone, tmp_path / "b.safetensors")
    assert isinstance(eventful.load(tmp_path / "b.safetensors"), ViTDetBackbone)


def test_what_cannot_be_saved_or_loaded_is_said(tmp_path: Path) -> None:
    model = tiny_models.detector()
    with pytest.raises(ConfigError, match=r"not a torch\.nn\.modules\.linear\.Linear"):
        eventful.save_model(nn.Linear(2, 2), tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"should end in \.safetensors"):
        eventful.save_model(model, tmp_path / "a.pth")
    with pytest.raises(ConfigError, match="2 names for 30 classes"):
        eventful.save_model(model, tmp_path / "a.safetensors", classes=("car", "person"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="is not there"):
        eventful.load(str(tmp_path / "a.safetensors"))
    with pytest.raises(ConfigError, match="there are detector, actions, focus, and files"):
        eventful.load("detectr")
