"""ViViT: the published arrays, its steps through a stream, its views, and its counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import eventful
from clips import moving_square
from eventful.cli import paper_tables as paper
from eventful.cli import reproduce
from eventful.config import PRESETS
from eventful.cost.counting import BlockWork, count_backbone
from eventful.cost.models import vitdet_b as vitdet_by_hand
from eventful.cost.models import vivit_b_spatial, vivit_b_temporal
from eventful.errors import ConfigError, FrameError, UnsupportedError
from eventful.models.shapes import spatial_shapes, temporal_shapes, vitdet_shapes
from eventful.models.vivit import (
    SpatialModel,
    ViViT,
    ViViTConfig,
    average_views,
    classify_views,
    prepare,
    spatial_vectors,
    steps,
    vivit_b_epic,
    vivit_b_kinetics,
)
from eventful.surgery.conversion import block_shapes
from published import config_from
from test_golden import CASES, read
from test_vitdet import golden_state, stir
from tolerances import VALUES, assert_near

TINY = ViViTConfig(
    classes=5, size=32, frames=8, patch=8, dim=16, depth=3, temporal_depth=2, heads=2
)


def tiny(config: ViViTConfig = TINY) -> ViViT:
    torch.manual_seed(0)
    model = ViViT(config).eval()
    stir(model)
    return model


def view(frames: int = 8, size: int = 32, seed: int = 0) -> Tensor:
    """(1, 3, T, H, W)."""
    return torch.stack(moving_square(frames, (size, size), seed=seed), dim=2)


class Recorded(SpatialModel):
    """Takes tokens as they were recorded, the class token's among them."""

    def tokens(self, clip: Tensor) -> Tensor:
        return torch.cat([self.recorded, clip[:, :, 0].flatten(2).transpose(1, 2)], dim=1)


def test_spatial_model_reproduces_the_published_arrays() -> None:
    path = next(path for path in CASES if path.stem == "backbone_vivit_full")
    meta, weights, frames = read(path)
    sizes, grid = meta["block_config"], tuple(meta["input_size"])
    config = ViViTConfig(
        size=grid[0], patch=1, dim=sizes["dim"], channels=sizes["dim"], depth=meta["depth"],
        heads=sizes["heads"],
    )  # fmt: skip
    model = Recorded(config).eval()
    state = golden_state(weights) | {"positions": weights["position_encoding.encoding"]}
    left = model.load_state_dict(state, strict=False)
    assert not left.unexpected_keys
    assert {key.split(".")[0] for key in left.missing_keys} == {"embed", "class_token", "norm"}
    converted = eventful.convert(model, config_from(meta))
    stream = eventful.Stream(converted)
    for t, (tokens, expected) in enumerate(frames):
        converted.recorded = tokens[:, :1]
        image = tokens[:, 1:].transpose(1, 2).unflatten(2, grid)
        out = stream.call("forward_features", image[:, :, None])
        assert_near(out, expected, "library", f"frame {t}")


@pytest.mark.parametrize("preset", PRESETS)
def test_updating_every_token_is_dense(preset: str) -> None:
    model, video = tiny(), view()
    spatial = eventful.convert(model.spatial, eventful.Config.preset(preset, eventful.TopR(17)))
    stream = eventful.Stream(spatial)
    records = []
    vectors = spatial_vectors(stream, video, observe=records.append)
    with torch.no_grad():
        dense = torch.stack([model.spatial(step) for step in steps(video)], dim=1)
        assert_near(vectors, dense)
        assert_near(model.classify(vectors), model(video))
    assert [record.flushed for record in records] == [[True], [False], [False], [False]]


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_cost_less_and_a_still_view_changes_nothing(preset: str) -> None:
    model, video = tiny(), view()
    still = video[:, :, :2].repeat(1, 1, 4, 1, 1)
    config = eventful.Config.preset(preset, eventful.TopR(4), protect=False, max_age=None)
    spatial = eventful.convert(model.spatial, config)
    stream = eventful.Stream(spatial)
    moved = spatial_vectors(stream, video)
    assert set(stream.last.updated.values()) == {4.0}
    assert stream.last.macs < stream.last.dense_macs
    vectors = spatial_vectors(stream, still)
    assert_near(vectors[:, 1:], vectors[:, :1].expand(-1, 3, -1), "step")
    # Each view begins afresh: what went before does not matter.
    assert torch.equal(spatial_vectors(stream, video), moved)


def test_the_whole_model_converts_and_steps_by_its_spatial_part() -> None:
    model, video = tiny(), view()
    converted = eventful.convert(model, eventful.Config.fast(eventful.TopR(17)))
    assert len(eventful.inspect(model).blocks) == 3  # the temporal blocks stay as they are
    with torch.no_grad():
        assert torch.equal(converted(video), model(video))
    with pytest.raises(UnsupportedError, match="4"):
        eventful.Stream(converted)(video)  # a view is four steps, not one


def test_views_are_averaged_before_the_softmax() -> None:
    model = tiny()
    views = [view(seed=seed) for seed in range(3)]
    with torch.no_grad():
        logits = torch.cat([model(part) for part in views])
    dense = classify_views(model, [part[0] for part in views])
    torch.testing.assert_close(dense, logits.mean(dim=0).softmax(dim=0))
    torch.testing.assert_close(dense.sum(), torch.tensor(1.0))
    assert not torch.allclose(dense, logits.softmax(dim=1).mean(dim=0), atol=1e-6)
    spatial = eventful.convert(model.spatial, eventful.Config.exact(eventful.TopR(17)))
    steps_seen = []
    streamed = classify_views(model, views, eventful.Stream(spatial), steps_seen.append)
    torch.testing.assert_close(streamed, dense, **VALUES)
    assert len(steps_seen) == 3 * 4
    with pytest.raises(FrameError, match="at least one"):
        classify_views(model, [])
    assert average_views(torch.tensor([[1000.0, 0.0]])).tolist() == [1.0, 0.0]


def test_pixels_and_other_sizes() -> None:
    frames = torch.full((8, 32, 32, 3), 255, dtype=torch.uint8)
    video = prepare(frames)
    assert video.shape == (1, 3, 8, 32, 32)
    assert video.flatten()[0] == pytest.approx(0.55 / 0.225)
    torch.testing.assert_close(prepare(frames.float() / 255), video)
    with torch.no_grad():  # positions are resized
        assert tiny()(view(size=48)).shape == (1, 5)


def test_videos_that_do_not_fit() -> None:
    model = tiny()
    with pytest.raises(FrameError, match="whole steps"):
        steps(torch.zeros(1, 3, 7, 32, 32))
    with pytest.raises(FrameError, match="4 steps"):
        model(torch.zeros(1, 3, 6, 32, 32))
    with pytest.raises(FrameError, match="A step is 2 frames"):
        model.spatial(torch.zeros(1, 3, 8, 32, 32))
    with pytest.raises(FrameError, match="frames"):
        prepare(torch.zeros(8, 3, 32, 32))
    with pytest.raises(ConfigError, match="whole number of steps"):
        ViViTConfig(frames=31)


def test_dropout_is_ahead_of_the_classifier_alone() -> None:
    model, video = tiny().train(), view()
    with torch.no_grad():
        vectors = torch.stack([model.spatial(step) for step in steps(video)], dim=1)
        assert torch.equal(model.temporal(vectors), model.temporal(vectors))
        assert not torch.equal(model.classify(vectors), model.classify(vectors))


def test_variants_of_the_paper() -> None:
    with torch.device("meta"):
        epic, kinetics = vivit_b_epic(), vivit_b_kinetics()
    assert epic.spatial.positions.shape == (1, 401, 768)
    assert kinetics.spatial.positions.shape == (1, 197, 768)
    assert [m.classifier.out_features for m in (epic, kinetics)] == [97, 400]
    assert epic.temporal.positions.shape == (1, 17, 768)
    assert ViViTConfig.from_dict(epic.config.to_dict()) == epic.config


def test_shapes_of_the_modules_are_those_written_by_hand() -> None:
    for size in (1024, 672):
        for pool in (1, 2):
            assert vitdet_shapes(size, pool=pool) == vitdet_by_hand(size, pool=pool)
    for size in (320, 224):
        assert count_backbone(spatial_shapes(size)) == count_backbone(vivit_b_spatial(size))
        assert count_backbone(temporal_shapes(size)) == count_backbone(vivit_b_temporal())


def test_counts_of_the_modules_match_the_paper() -> None:
    """Every row that shapes fix, through the modules that `reproduce counts` builds."""
    fixed = [row for row in reproduce.count_rows() if row["ours"] is not None]
    assert len(fixed) == sum(
        cost.h is None and cost.variant != paper.SPATIOTEMPORAL for cost in paper.COSTS
    )
    assert all(abs(row["relative_difference"]) < 0.005 for row in fixed)


def test_counts_of_a_running_stream_are_the_closed_form() -> None:
    """A small model of the same make: what a stream records is what the tables are made of."""
    model = tiny()
    config = eventful.Config.paper(eventful.TopR(6))
    records = []
    stream = eventful.Stream(eventful.convert(model.spatial, config))
    spatial_vectors(stream, view(), observe=records.append)

    shapes = block_shapes(model.spatial, 32, config)
    step = count_backbone(shapes, config, [BlockWork.uniform(6)] * 3)
    assert [record.macs for record in records] == [
        count_backbone(shapes).total, *[step.total] * 3
    ]  # fmt: skip
