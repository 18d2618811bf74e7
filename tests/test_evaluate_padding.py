"""How much of a frame is padding, and what skipping it would save."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import miniatures
from evaluation_data import vid, weights  # noqa: F401
from eventful.models.vitdet.model import detector_config
from eventful.paper.data import open_dataset
from eventful.paper.evaluate import experiment as experiments
from eventful.paper.evaluate.evaluation import Settings, evaluate
from eventful.paper.evaluate.models import Weights
from eventful.paper.evaluate.padding import (
    mean_padding,
    padding_of,
    skipped_if_none_is_padding,
)
from eventful.paper.evaluate.variants import Variant
from miniatures import damaged  # noqa: F401


def test_padding_of_a_wide_frame_is_that_of_its_shape() -> None:
    config = detector_config(30, 1024, False, "bicubic")
    found = padding_of((720, 1280), config)  # becomes 576 x 1024: 36 of 64 rows
    assert found.pixels == pytest.approx(1 - 576 / 1024)
    assert found.tokens == pytest.approx(1 - 36 / 64)
    assert padding_of((500, 500), config).tokens == pytest.approx(1 - (40 / 64) ** 2)


def test_two_thirds_of_the_rest_are_skipped_at_the_papers_padding() -> None:
    assert skipped_if_none_is_padding(0.446, 4096, 768) == pytest.approx(0.66, abs=0.005)


def test_padding_is_measured_from_sizes_and_selections(
    vid: Path, weights: Path, tmp_path: Path
) -> None:
    videos = open_dataset(vid, "val").videos
    config = Weights(weights).vitdet_config()
    sizes = mean_padding(videos, config)  # 48 x 64 pixels: 3 of 4 rows
    assert sizes["padded_tokens"] == pytest.approx(0.25)
    assert sizes["frames"] == 4
    paper = experiments.load("padding")
    alone = evaluate(paper, Settings(vid, {}))
    assert alone.rows == ()
    assert alone.statistics["padded_tokens"] == pytest.approx(
        1 - 40 * 54 / 64**2  # 640 x 853 pixels
    )
    small = replace(paper, variants=(Variant("Ours", "paper", size=64, r=3),))
    report = evaluate(small, Settings(vid, {"base": weights}))
    found = report.statistics
    inside = 3 * (1 - found["selected_padding"]) / 12
    assert found["unpadded_skipped"] == pytest.approx(1 - inside)
    assert found["unpadded_skipped"] >= found["unpadded_skipped_at_least"] - 1e-9


def test_padding_leaves_out_what_cannot_be_read(damaged: Path, weights: Path) -> None:
    first = next(damaged.rglob("Data/VID/val/ILSVRC2015_val_00001000/000000.JPEG"))
    first.unlink()
    made = replace(experiments.load("padding"), variants=(Variant("Ours", "paper", size=64, r=3),))
    for given in ({}, {"base": weights}):
        report = evaluate(made, Settings(damaged, given))
        assert report.statistics["videos"] == 1
        assert any("000000.JPEG is not there" in why for why in report.problems.values())
        miniatures.strict_json(json.dumps(report.to_dict()))
