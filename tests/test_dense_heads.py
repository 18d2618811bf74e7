"""Dense heads of transformers that compute only what a changed token reaches: Depth Anything, DPT.

The heads are compared with transformers' own on the same features; tests/test_map_layers.py has the
layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eventful
import zoo_transformers
from clips import moving_square
from eventful import Config, Stream, StreamBatch, TopR, errors
from eventful.memory.state import RowState
from eventful.memory.values import ValueState
from eventful.rules import map_graph
from eventful.rules.local import HeadMemory
from eventful.rules.map_graph import Map, MapUpdate
from eventful.rules.map_layers import (
    Convolution,
    Pointwise,
    TileLayer,
)
from eventful.rules.step import Step
from eventful.surgery.heads import head_bytes, local_heads
from eventful.tokens.layout import TokenLayout
from tolerances import limit

transformers: Any = zoo_transformers.transformers

GRID = (5, 7)
SIZE = (8 * GRID[0], 8 * GRID[1])
WIDTH = 32
PLAIN = Config.fast(TopR(4), fallback=False, max_age=None, motion=False, scene_cut=None)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Maps of these small models have several tiles, and tiles of one map overlap."""
    monkeypatch.setattr(map_graph, "tile_sides", lambda: (7, 11))


def backbone_config(**options: Any) -> Any:
    settings = {
        "hidden_size": WIDTH,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "image_size": 40,
        "patch_size": 8,
        "mlp_ratio": 2,
        "out_indices": [1, 2, 3, 4],
        "reshape_hidden_states": False,
    }
    return transformers.Dinov2Config(**settings | options)


def with_values(model: nn.Module) -> nn.Module:
    """Weights with which every layer makes values of about one, and places differ."""
    draw = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if not name.startswith("backbone"):
            gain = weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.1
            weight.data = gain * torch.randn(weight.shape, generator=draw)
            if weight.shape == (1,):  # of the last layer: the ReLU behind it must not hide the rest
                weight.data += 3
    return model.eval()


def depth_anything(**options: Any) -> nn.Module:
    settings = {
        "backbone_config": backbone_config(),
        "patch_size": 8,
        "reassemble_hidden_size": WIDTH,
        "neck_hidden_sizes": [8, 8, 12, 16],
        "fusion_hidden_size": 8,
        "head_hidden_size": 6,
    }
    config = transformers.DepthAnythingConfig(**settings | options)
    torch.manual_seed(1)
    return with_values(transformers.DepthAnythingForDepthEstimation(config))


def dpt(**options: Any) -> nn.Module:
    settings = {
        "backbone_config": backbone_config(),
        "readout_type": "ignore",
        "neck_hidden_sizes": [8, 8, 12, 16],
        "fusion_hidden_size": 8,
        "use_batch_norm_in_fusion_residual": True,
        "add_projection": False,
    }
    config = transformers.DPTConfig(**settings | options)
    torch.manual_seed(1)
    model = with_values(transformers.DPTForDepthEstimation(config))
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.weight.data += 1
        norm.running_mean.uniform_(-0.2, 0.2)
        norm.running_var.uniform_(0.5, 2)
    return model


MODELS = {
    "depth_anything": depth_anything,
    "metric": lambda: depth_anything(depth_estimation_type="metric", max_depth=20),
    "dpt": dpt,
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return depth_anything()


def assert_near(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert (one - other).abs().max() <= limit("model") * other.abs().max()


# --- heads on features -----------------------------------------------------------------------


def features_of(tokens: Tensor, grid=GRID) -> list[Tensor]:
    """Tokens (4, B, N, D) as the tapped layers of a backbone, with a class token that changes."""
    first = torch.randn(4, tokens.shape[1], 1, WIDTH)
    return list(torch.cat([first, tokens], dim=2))


def heads_of(model: nn.Module) -> dict[str, Any]:
    return {name: head for name, _, head in local_heads(model)}


@torch.no_grad()
def run_heads(model: nn.Module, state, tokens: Tensor, *, flush=False, grid=GRID, constants=None):
    """The result of a step on features, its update, and the step."""
    step = Step(
        PLAIN, state, [TopR(1)] * len(state), [flush] * len(state), {"backbone": TokenLayout(grid)},
        constants={} if constants is None else constants,
    )  # fmt: skip
    heads = heads_of(model)
    fused = heads["neck"].step_forward(HeadMemory(step, "neck"), features_of(tokens, grid), *grid)
    if fused is None:
        return None, None, step
    return heads["head"].step_forward(HeadMemory(step, "head"), fused, *grid), fused, step


@torch.no_grad()
def dense_heads(model: nn.Module, tokens: Tensor, grid=GRID) -> Tensor:
    fused = model.neck(features_of(tokens, grid), *grid)
    own = "DepthAnything" in type(model).__name__
    return model.head(fused, *grid) if own else model.head(fused)


def pattern(kind: str, grid: tuple[int, int], draw: torch.Generator) -> Tensor:
    changed = torch.zeros(2, *grid, dtype=torch.bool)
    if kind == "one":
        changed[0, grid[0] // 2, grid[1] // 2] = True
    elif kind == "corners":
        changed[0, 0, 0] = changed[1, -1, -1] = True
    elif kind == "edges":
        changed[0, :, -1] = changed[1, 0] = True
    elif kind == "some":
        changed = torch.rand(2, *grid, generator=draw) < 0.3
    elif kind == "all of one":
        changed[1] = True
    elif kind == "all":
        changed[:] = True
    return changed


KINDS = ("one", "none", "corners", "edges", "some", "all of one", "all", "corners")


CASES = [(name, GRID) for name in MODELS] + [("depth_anything", g) for g in ((8, 3), (16, 18))]


@pytest.mark.parametrize(("name", "grid"), CASES, ids=str)
def test_any_pattern_of_change_is_dense(name, grid):
    model, state, constants = MODELS[name](), RowState(2), {}
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randn(4, 2, grid[0] * grid[1], WIDTH, generator=draw)
    before, _, step = run_heads(model, state, tokens, flush=True, grid=grid, constants=constants)
    # Tiles overlap and have margins, which count: these are a fifth of the usual size.
    assert 1 <= step.record.head_macs / step.record.dense_head_macs < 1.3
    assert_near(before, dense_heads(model, tokens, grid))
    for kind in KINDS:
        changed = pattern(kind, grid, draw)
        fresh = torch.randn(tokens.shape, generator=draw)
        tokens = torch.where(changed.flatten(1)[None, ..., None], fresh, tokens)
        out, *_ = run_heads(model, state, tokens, grid=grid, constants=constants)
        assert_near(out, dense_heads(model, tokens, grid))
        same = (out == before).flatten(1).all(dim=1)
        assert torch.equal(same, ~changed.flatten(1).any(dim=1)), kind
        before = out


def test_pixels_out_of_reach_keep_their_bits_and_the_others_do_not():
    """Of a larger grid a corner changes; the dense head in fp64 shows what it reaches."""
    model, grid = MODELS["metric"](), (24, 24)  # a ReLU at the end would hide changes
    state, constants = RowState(1), {}
    tokens = torch.randn(4, 1, 576, WIDTH, generator=torch.Generator().manual_seed(8))
    before, *_ = run_heads(model, state, tokens, flush=True, grid=grid, constants=constants)
    held = {name: state[name].clone() for name in state.names() if name.startswith("neck/")}
    other = tokens.clone()
    other[:, :, :2] += 1
    out, fused, step = run_heads(model, state, other, grid=grid, constants=constants)
    one, two = (dense_heads(model.double(), x.double(), grid) for x in (tokens, other))
    differ = (one - two).abs() > 1e-5
    assert 0.1 < differ.float().mean() < 0.5
    assert not ((out == before) & differ).any()
    assert (out == before).float().mean() > 0.5
    assert 0 < step.record.head_macs < 0.8 * step.record.dense_head_macs
    for one in fused.maps.kept:
        mask = fused.update.changed(one).flatten(1)
        name = f"neck/{one.kept}"
        assert torch.equal(state[name][~mask], held[name][~mask])
        assert not torch.equal(state[name], held[name])


@pytest.mark.parametrize("side", [4, 1000])
def test_the_size_of_tiles_does_not_matter(model, side, monkeypatch):
    monkeypatch.setattr(map_graph, "tile_sides", lambda: (side, side))
    state, constants, tokens = RowState(2), {}, torch.randn(4, 2, 35, WIDTH)
    run_heads(model, state, tokens, flush=True, constants=constants)
    tokens = tokens.clone()
    tokens[:, 0, 3] += 1
    out, *_ = run_heads(model, state, tokens, constants=constants)
    assert_near(out, dense_heads(model, tokens))


def test_one_tapped_layer_changes_alone(model):
    state, constants, tokens = RowState(2), {}, torch.randn(4, 2, 35, WIDTH)
    run_heads(model, state, tokens, flush=True, constants=constants)
    tokens = tokens.clone()
    tokens[0, 1, 30] += 1
    out, _, step = run_heads(model, state, tokens, constants=constants)
    assert_near(out, dense_heads(model, tokens))
    computed = {name: work.computed.tolist() for name, work in step.record.heads["neck"].items()}
    coarse = [count for name, count in computed.items() if not name.startswith(("side3", "fused3"))]
    assert set(map(tuple, coarse)) == {(0, 0)}
    assert all(first == 0 for first, _ in computed.values())


def test_what_was_written_is_undone(model):
    state, constants, tokens = RowState(2), {}, torch.randn(4, 2, 35, WIDTH)
    state.begin()
    run_heads(model, state, tokens, flush=True, constants=constants)
    state.rollback()
    assert not state.tensors
    run_heads(model, state, tokens, flush=True, constants=constants)
    held = {name: state[name].clone() for name in state.names()}
    worse = tokens.clone()
    worse[:, 0, 2:9] = torch.nan
    state.begin()
    run_heads(model, state, worse, constants=constants)
    state.rollback()
    assert held.keys() == state.tensors.keys()
    assert all(torch.equal(state[name], value) for name, value in held.items())


def test_others_who_take_the_neck_get_its_maps(model):
    state, tokens = RowState(2), torch.randn(4, 2, 35, WIDTH)
    _, fused, _ = run_heads(model, state, tokens, flush=True)
    with torch.no_grad():
        expected = model.neck(features_of(tokens), *GRID)
    assert len(fused) == len(expected)
    for one, other in zip(fused, expected, strict=True):
        assert_near(one, other)
        assert one.stride() == other.stride()
    kept = fused[-1].clone()
    assert all(map(torch.equal, fused[1:], [fused[i] for i in (1, 2, 3)]))
    one = fused[-1]
    state["neck/fused3"].zero_()
    assert torch.equal(one, kept)


@pytest.mark.parametrize("case", ["values", "size", "double", "count", "class"])
def test_what_the_neck_does_not_take(model, case):
    tokens = torch.randn(4, 2, 35, WIDTH)
    features, size, state = features_of(tokens), GRID, RowState(2)
    if case == "values":  # a step that is exported
        state = ValueState({}, may_be_empty=False)
        state.frames = [-1, -1]
    elif case == "size":
        size = (7, 5)
    elif case == "double":
        features = [one.double() for one in features]
    elif case == "count":
        features = features[:3]
    else:
        features = [one[:, 1:] for one in features]
    step = Step(PLAIN, state, [TopR(1)] * 2, [True] * 2, {"backbone": TokenLayout(GRID)})
    neck = heads_of(model)["neck"]
    assert neck.step_forward(HeadMemory(step, "neck"), features, *size) is None


# --- streams ---------------------------------------------------------------------------------


def assert_dense(model: nn.Module, stream: Stream | StreamBatch, out: Any) -> None:
    """The result is that of the dense heads on the features that the maps were made of."""
    held = stream._state.detached().tensors
    tokens = torch.stack([held[f"neck/reference{i}"] for i in range(4)])
    assert_near(out.predicted_depth, dense_heads(model, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_a_stream_has_the_depth_of_its_features(name):
    model = MODELS[name]()
    stream = Stream(eventful.convert(model, Config.fast(fallback=False)))
    plain = Stream(without_heads(eventful.convert(model, Config.fast(fallback=False))))
    shares = []
    for frame in moving_square(4, SIZE, noise=0.01):
        out = stream(frame)
        assert_dense(model, stream, out)
        assert_near(out.predicted_depth, plain(frame).predicted_depth)
        shares.append(stream.last.head_macs / stream.last.dense_head_macs)
    assert shares[0] >= 1
    assert stream.last.macs == plain.last.macs


def without_heads(model: nn.Module) -> nn.Module:
    """The converted model with the original forward of its heads."""
    for part in (model.neck, model.head):
        del vars(part)["forward"]
    return model


def test_a_still_scene_costs_the_heads_nothing(model):
    config = Config.fast(TopR(0), fallback=False, max_age=None)
    stream = Stream(eventful.convert(model, config))
    frame = moving_square(1, SIZE)[0]
    one = stream(frame).predicted_depth
    assert stream.last.head_macs > 0
    other = stream(frame).predicted_depth
    assert stream.last.head_macs == 0 < stream.last.dense_head_macs
    assert torch.equal(one, other)
    one.zero_()
    assert torch.equal(stream(frame).predicted_depth, other)


def test_gates_around_blocks(model):
    config = Config(TopR(4), gating="block", protect=False)
    stream = Stream(eventful.convert(model, config))
    for frame in moving_square(3, SIZE):
        assert_dense(model, stream, stream(frame))


@torch.no_grad()
def test_other_gatings_and_the_model_outside_a_stream_are_the_original(model):
    frame = moving_square(1, SIZE)[0]
    for config in (Config.exact(), Config.fast()):
        converted = eventful.convert(model, config)
        assert torch.equal(converted(frame).predicted_depth, model(frame).predicted_depth)
        stream = Stream(converted)
        stream(frame)
        assert ("head/out" in stream._state) == (config.gating == "frame")
        assert bool(stream.last.dense_head_macs) == (config.gating == "frame")
    assert type(converted.neck.forward).__name__ == "HeadForward"


def test_restore_takes_the_heads_back(model):
    converted = eventful.convert(depth_anything(), Config.fast(), inplace=True)
    assert "forward" in vars(converted.neck)
    eventful.restore(converted)
    assert "forward" not in vars(converted.neck)


def test_streams_in_a_batch_are_those_alone(model):
    converted = eventful.convert(model, PLAIN)
    batch, alone = StreamBatch(converted), {}
    clips = {name: moving_square(5, SIZE, seed=seed) for seed, name in enumerate("abc")}
    for time in range(5):
        if time < 3:  # others join later, and flush in a pass of their own
            name = "abc"[len(alone)]
            batch.join(name)
            alone[name] = Stream(converted)
        if time == 3:
            batch.flush("b")
            alone["b"].flush()
        out = batch(torch.cat([clips[name][time] for name in alone])).predicted_depth
        for row, (name, stream) in enumerate(alone.items()):
            expected = stream(clips[name][time]).predicted_depth
            assert_near(out[row : row + 1], expected)


def test_a_bad_frame_and_a_failure_behind_the_heads_change_nothing(model, monkeypatch):
    stream = Stream(eventful.convert(model, PLAIN))
    clip = moving_square(4, SIZE)
    stream(clip[0])
    before = {name: tensor.clone() for name, tensor in stream._state.tensors.items()}
    with pytest.raises(errors.NonFiniteError):
        stream(torch.full_like(clip[1], torch.nan))

    def fail(*args, **kwargs):
        raise ArithmeticError("behind the heads")

    with monkeypatch.context() as patch:
        name = "transformers.models.depth_anything.modeling_depth_anything.DepthEstimatorOutput"
        patch.setattr(name, fail)
        with pytest.raises(ArithmeticError):
            stream(clip[1])
    after = stream._state.tensors
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7)) for name in after)
    assert_dense(model, stream, stream(clip[2]))


def test_a_snapshot_holds_the_maps(model):
    converted = eventful.convert(model, PLAIN)
    stream, clip = Stream(converted), moving_square(4, SIZE)
    for frame in clip[:2]:
        stream(frame)
    other = Stream.load(converted, stream.snapshot())
    outs = [one(clip[2]).predicted_depth for one in (stream, other)]
    assert torch.equal(*outs)
    assert other.last.head_macs == stream.last.head_macs


def test_what_heads_hold_is_counted(model):
    stream = Stream(eventful.convert(model, Config.fast()))
    stream(moving_square(1, SIZE)[0])
    held = stream._state.tensors
    heads = sum(t.nbytes for name, t in held.items() if name.startswith(("neck/", "head/")))
    assert heads == head_bytes(model, GRID, Config.fast(), torch.float32)
    assert heads == head_bytes(
        eventful.convert(model, Config.fast()), GRID, Config.fast(), torch.float32
    )
    assert eventful.inspect(model, SIZE).state_bytes["fast"] > heads
    assert head_bytes(model, GRID, Config.exact(), torch.float32) == 0
    assert head_bytes(model, GRID, Config.fast(), torch.bfloat16) == 0


def test_heads_hold_no_more_than_the_backbone():
    """Depth Anything Small at its usual size."""
    with torch.device("meta"):
        backbone = transformers.Dinov2Config(
            hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14,
            out_indices=[3, 6, 9, 12], reshape_hidden_states=False,
        )  # fmt: skip
        config = transformers.DepthAnythingConfig(
            backbone_config=backbone, reassemble_hidden_size=384,
            neck_hidden_sizes=[48, 96, 192, 384], fusion_hidden_size=64,
        )  # fmt: skip
        large = transformers.DepthAnythingForDepthEstimation(config)
    both = eventful.inspect(large, 518).state_bytes["fast"]
    heads = head_bytes(large, (37, 37), Config.fast(), torch.float32)
    assert heads > 30e6
    assert 2 * heads <= both


def test_written_weights_of_a_head_are_noticed():
    model = depth_anything()
    stream, frame = Stream(eventful.convert(model, PLAIN)), moving_square(1, SIZE)[0]
    stream(frame)
    with torch.no_grad():
        model.head.conv1.bias.add_(1)
    with pytest.raises(errors.WeightsChangedError):
        stream(frame)
    stream.reset()
    assert_dense(model, stream, stream(frame))


@pytest.mark.parametrize("place", ["neck.fusion_stage.layers.1", "neck", "head.conv2", "head"])
def test_a_hook_is_called(model, place):
    converted, clip = eventful.convert(model, PLAIN), moving_square(4, SIZE)
    stream, plain = Stream(converted), Stream(without_heads(eventful.convert(model, PLAIN)))
    seen: list[Any] = []
    stream(clip[0]), plain(clip[0])
    handle = converted.get_submodule(place).register_forward_hook(
        lambda *call: seen.append(call[2])
    )
    assert_near(stream(clip[1]).predicted_depth, plain(clip[1]).predicted_depth)
    assert len(seen) == 1
    assert isinstance(seen[0], Tensor | list)
    handle.remove()
    for frame in clip[2:]:
        assert_near(stream(frame).predicted_depth, plain(frame).predicted_depth)


class Doubled(nn.Conv2d):
    """A layer that is not what its class's parent is."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("case", ["class", "forward", "precision", "kernel"])
def test_a_replaced_part_runs_as_it_is(case):
    model, frame = depth_anything(), moving_square(1, SIZE)[0]
    if case == "class":
        model.head.conv2.__class__ = Doubled
    elif case == "forward":
        model.neck.convs[1].forward = lambda x: 2 * nn.Conv2d.forward(model.neck.convs[1], x)
    elif case == "kernel":
        model.neck.convs[0] = nn.Conv2d(8, 8, 5, padding=2).eval()
    else:
        model.neck.convs[0] = _Cast(model.neck.convs[0]).eval()
    converted = eventful.convert(model, PLAIN)
    stream = Stream(converted)
    with torch.no_grad():
        assert_near(stream(frame).predicted_depth, model(frame).predicted_depth)
    assert "head/out" not in stream._state


class _Cast(nn.Module):
    """A layer in another precision."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.double()).float()


def test_autocast_runs_the_original_heads(model):
    stream = Stream(eventful.convert(model, PLAIN))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream(moving_square(1, SIZE)[0])
    assert "head/out" not in stream._state


def test_steps_of_a_device_run_the_original_heads(model, monkeypatch):
    monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    stream = Stream(eventful.convert(model, PLAIN))
    plain = Stream(without_heads(eventful.convert(model, PLAIN)))
    for frame in moving_square(3, SIZE):
        assert torch.equal(stream(frame).predicted_depth, plain(frame).predicted_depth)
    assert stream.last.dense_head_macs == 0


def test_a_class_token_that_enters_every_token_leaves_the_heads_dense():
    model = dpt(readout_type="project")
    assert not heads_of(model)
    assert set(heads_of(dpt())) == {"neck", "head"}


def test_a_sum_of_maps_that_nobody_reaches_costs_nothing():
    """`MapUpdate` alone: two given maps, one of which changes."""
    state = RowState(1)
    step = Step(PLAIN, state, [TopR(1)], [False], {"backbone": TokenLayout(GRID)})
    one, other = Map((20, 20), 4), Map((20, 20), 4)
    layer: TileLayer = Convolution(nn.Conv2d(4, 4, 3, padding=1))
    kept = one.plus(other.then(layer)).then(Pointwise(torch.sigmoid), kept="sum")
    values = {each: torch.randn(1, 20, 20, 4) for each in (one, other)}
    changed = {each: torch.ones(1, 20, 20, dtype=torch.bool) for each in (one, other)}
    memory = HeadMemory(step, "head")
    with torch.no_grad():
        first = MapUpdate(memory, values, changed).bring(kept)
        first[0, 5, 5] = 7  # out of reach, in the same tile
        first = first.clone()
        changed = {each: torch.zeros(1, 20, 20, dtype=torch.bool) for each in (one, other)}
        changed[one][0, 3, 3] = True
        values[one][0, 3, 3] += 1
        after = MapUpdate(memory, values, changed).bring(kept)
        dense = values[one].permute(0, 3, 1, 2) + layer.conv(values[other].permute(0, 3, 1, 2))
    differ = (after != first).any(dim=-1)
    assert differ.sum() == 1
    assert differ[0, 3, 3]
    assert (after[0, 5, 5] == 7).all()
    after[0, 5, 5] = dense.sigmoid()[0, :, 5, 5]
    assert_near(after.permute(0, 3, 1, 2), dense.sigmoid())
    (work,) = step.record.heads["head"].values()
    assert int(work.computed) == kept.tile[0] * kept.tile[1]
