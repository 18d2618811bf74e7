"""`eventful.read`: the size and the values of frames."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import eventful
import videos
from eventful.errors import ConfigError
from eventful.video.normalization import IMAGENET
from eventful.video.source import VideoFile
from reading import pan  # noqa: F401

pytest.importorskip("av")
pytest.importorskip("PIL")


@pytest.mark.parametrize(
    ("fit", "region"),
    [
        ("pad", (8.0, 0.0, 48.0, 64.0)),
        ("crop", (0.0, -11.0, 64.0, 85.0)),
        ("stretch", (0.0, 0.0, 64.0, 64.0)),
    ],
)
def test_fits(pan, fit, region):
    frame = next(iter(eventful.read(pan, 64, fit=fit)))
    assert frame.shape == (1, 3, 64, 64)
    assert frame.original_size == videos.SIZE
    assert frame.region == region
    top, left, height, width = region
    whole = torch.tensor([left, top, left + width, top + height])
    assert frame.to_original(whole).tolist() == [0, 0, 128, 96]
    assert ((frame == 0).all(1)[0, 0].all()) == (fit == "pad")
    raw = next(iter(VideoFile(pan)))[None].float()
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in IMAGENET)
    expected = F.interpolate(raw, (int(height), int(width)), mode="bilinear", antialias=True)
    expected = (expected / 255 - mean) / std
    if fit == "crop":
        expected, shown = expected[..., 11:75], frame
    else:
        shown = frame[..., int(top) : int(top + height), :]
    apart = (shown - expected).abs() * std * 255  # in levels from 0 to 255
    assert apart.mean() < 1.5
    assert apart.max() < 12


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (96, 128)),
        ({"multiple_of": 14}, (98, 126)),
        ({"size": (50, 70), "multiple_of": 16}, (48, 64)),
        ({"size": 5, "multiple_of": 14}, (14, 14)),
        ({"size": (200, 300)}, (200, 300)),
    ],
)
def test_sizes(pan, options, shape):
    assert tuple(next(iter(eventful.read(pan, **options))).shape[2:]) == shape


def test_images_are_scaled_alike(tmp_path):
    from PIL import Image

    pixels = videos.texture(96, 128)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    frame = next(iter(eventful.read(tmp_path, (48, 64), normalize="none")))
    raw = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    expected = F.interpolate(raw, (48, 64), mode="bilinear", antialias=True)
    assert (frame - expected).abs().max() < 1.1 / 255


def processor(**more):
    return SimpleNamespace(
        image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.2], do_normalize=True, **more
    )


def timm_model(**more):
    settings = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.25, 0.2), "input_size": (3, 32, 48)}
    return SimpleNamespace(pretrained_cfg=settings, **more)


@pytest.mark.parametrize(
    "given",
    [
        ((0.5, 0.4, 0.3), (0.5, 0.25, 0.2)),
        timm_model(),
        SimpleNamespace(default_cfg=SimpleNamespace(mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))),
        processor(),
        SimpleNamespace(config=processor()),
        SimpleNamespace(image_processor=processor()),
    ],
    ids=["pair", "timm", "timm object", "processor", "config", "whole processor"],
)
def test_normalization(pan, given):
    raw = next(iter(eventful.read(pan, normalize="none")))
    mean = torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1)
    std = torch.tensor([0.5, 0.25, 0.2]).view(1, 3, 1, 1)
    found = next(iter(eventful.read(pan, normalize=given)))
    assert (found - (raw - mean) / std).abs().max() < 1e-5


def test_a_config_names_the_folder_of_its_processor(pan, tmp_path):
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    model = SimpleNamespace(config=SimpleNamespace(_name_or_path=str(tmp_path), image_size=32))
    frame = next(iter(eventful.read(pan, model=model, fit="stretch")))
    raw = next(iter(eventful.read(pan, 32, normalize="none", fit="stretch")))
    assert (frame - (raw - 0.5) / 0.5).abs().max() < 1e-5
    bare = SimpleNamespace(config=SimpleNamespace(_name_or_path="nobody/nothing", image_size=32))
    with pytest.raises(ConfigError, match="does not say how its pictures are normalised"):
        eventful.read(pan, model=bare)


def test_a_processor_that_does_not_normalize(pan):
    given = processor()
    given.do_normalize = False
    raw = next(iter(eventful.read(pan, normalize="none")))
    assert next(iter(eventful.read(pan, normalize=given))).equal(raw)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (timm_model(), (32, 48)),
        (timm_model(patch_embed=SimpleNamespace(img_size=(56, 42))), (56, 42)),
        (processor(size={"height": 24, "width": 40}), (24, 40)),
        (processor(size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56}), (56, 56)),
        (processor(size={"shortest_edge": 64}), (64, 64)),
        (processor(), videos.SIZE),
    ],
)
def test_size_of_a_model(pan, model, shape):
    assert tuple(next(iter(eventful.read(pan, model=model))).shape[2:]) == shape
    assert tuple(next(iter(eventful.read(pan, 16, model=model))).shape[2:]) == (16, 16)


def test_a_picture_that_is_shown_rotated(pan, monkeypatch):
    from eventful.video import pyav

    upright = next(iter(eventful.read(pan, normalize="none")))
    inner = pyav.AvDecoder._picture

    class Turned:
        def __init__(self, frame):
            self.__dict__.update(
                real=frame, rotation=-90, height=frame.height, width=frame.width, key_frame=True
            )

    def picture(self, frame):
        reformat = self._reformatter.reformat
        self._reformatter = SimpleNamespace(reformat=lambda f, *a, **k: reformat(f.real, *a, **k))
        return inner(self, Turned(frame))

    monkeypatch.setattr(pyav.AvDecoder, "_picture", picture)
    turned = next(iter(eventful.read(pan, normalize="none")))
    assert turned.shape == (1, 3, 128, 96)
    assert turned.equal(upright.rot90(-1, (2, 3)))
