"""What the tests of `eventful run` share: a tiny detector, a small world, plain settings."""

from __future__ import annotations

import pytest

import tiny_models
from eventful.models.saving import save_model
from eventful.pipeline.settings import RunSettings
from eventful.video.world import CLASSES

WORLD = "world:7?size=64x96&exposures=1&frames=10"
PLAIN = RunSettings(video=False, report=False, score=0.0)


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a tiny ViTDet for the classes of the world; it knows nothing."""
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    save_model(tiny_models.detector(len(CLASSES)), path, classes=CLASSES)
    return str(path)
