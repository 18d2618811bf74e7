"""Miniature data and weights for the tests of the evaluation, as fixtures to import."""

from __future__ import annotations

from pathlib import Path

import pytest

import miniatures
import tiny_models


@pytest.fixture(scope="module")
def vid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet VID, two frames a video."""
    return miniatures.imagenet(tmp_path_factory.mktemp("vid"), frames=2)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector with random weights."""
    path = tmp_path_factory.mktemp("weights") / "vitdet.safetensors"
    return tiny_models.write(tiny_models.detector(), path)


@pytest.fixture(scope="module")
def vivit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recogniser of actions with random weights."""
    path = tmp_path_factory.mktemp("weights") / "vivit.safetensors"
    return tiny_models.write(tiny_models.recogniser(), path)
