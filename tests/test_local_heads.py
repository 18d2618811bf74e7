"""Heads that compute only what a changed token reaches, against the dense heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import eventful
from backends import DEVICE, backends, make, poison, triton  # noqa: F401
from clips import moving_square
from eventful import Config, Stream, StreamBatch, TopR, errors, ops
from eventful.memory.slots import SlotPool, SlotState
from eventful.memory.state import RowState
from eventful.models.vitdet import ViTDet
from eventful.models.vitdet.boxes import Padded, pyramid_level
from eventful.models.vitdet.kept_regions import RegionMemory, kept_regions
from eventful.models.vitdet.pyramid import SimpleFeaturePyramid
from eventful.models.vitdet.regions import pool_regions
from eventful.models.vitdet.updated import SCALES, UpdatedMaps, pyramid_levels
from eventful.ops import Lift, MapLayer, MapLevels, eager_maps, packed
from eventful.rules.local import HeadMemory, conv_taps, lift_weight, plain_parts
from eventful.rules.step import Step
from eventful.surgery import linears
from eventful.surgery.heads import head_bytes
from eventful.tokens.layout import TokenLayout
from tiny_models import detector

GRID = (7, 9)
SIZE = (16 * GRID[0], 16 * GRID[1])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def rearranged(monkeypatch):
    """Weights are rearranged as in a detector of the usual size; test_map_ops has plain ones."""
    monkeypatch.setattr(packed, "LEAST", 1)
    monkeypatch.setattr(linears, "LEAST", 1)


@pytest.fixture(params=["host", "resident"])
def path(request, monkeypatch):
    devices = {"cpu"} if request.param == "resident" else set()
    monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
    return request.param


@pytest.fixture(scope="module")
def model() -> ViTDet:
    """A tiny detector whose proposal network tells places apart."""
    model = detector(size=SIZE[1]).eval()
    torch.manual_seed(5)
    for parameter in (*model.rpn.parameters(), *model.pyramid.parameters()):
        parameter.data = 0.1 * torch.randn(parameter.shape)
    for norm in (m for m in model.pyramid.modules() if isinstance(m, torch.nn.LayerNorm)):
        norm.weight.data += 1
    return model


# --- operations ------------------------------------------------------------------------------


def test_a_lift_is_the_transposed_convolution():
    conv = torch.nn.ConvTranspose2d(6, 4, 2, stride=2)
    tokens = make(2, 15, 6)
    out = torch.zeros(2, 60, 4)
    weight, bias = lift_weight(conv)
    every = ops.list_changed(torch.ones(2, 15, dtype=torch.bool), ((3, 5),))
    ops.lift_tokens_(out, tokens, Lift(weight, bias, scale=2), every, (3, 5), 0)
    expected = conv(tokens.transpose(1, 2).unflatten(2, (3, 5))).permute(0, 2, 3, 1)
    torch.testing.assert_close(out.view(2, 6, 10, 4), expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("grid", [(2, 2), (5, 4), GRID], ids=str)
def test_changed_pixels_are_those_that_change(model, grid):
    """One token after another changes; the dense heads show which pixels it reaches."""
    levels = pyramid_levels(grid)
    image = make(1, 32, *grid)
    every = image.expand(grid[0] * grid[1], -1, -1, -1).clone()
    tokens = torch.zeros(len(every), *grid, dtype=torch.bool)
    for number, (y, x) in enumerate(torch.cartesian_prod(*map(torch.arange, grid)).tolist()):
        every[number, :, y, x] += 3
        tokens[number, y, x] = True

    def runs(image):
        maps = model.pyramid.double()(image.double())
        mid = [model.rpn.convs[0].double()(part).relu() for part in maps]
        out = [model.rpn.convs[1].double()(part.relu()) for part in mid]
        return [torch.cat([p.flatten(2) for p in parts], 2) for parts in (maps, mid, out)]

    try:
        for reach, (one, many) in enumerate(zip(runs(image), runs(every), strict=True), start=1):
            found = ops.changed_pixels(tokens, levels, SCALES, reach)
            differ = (one != many).any(dim=1)
            assert not (differ & ~found).any()
            fine = slice(0, levels.offsets[3])  # a maximum may hide a change
            assert torch.equal(differ[:, fine], found[:, fine])
            reached = [part.any(dim=0) for part in (differ, found)]
            assert torch.equal(*reached)
    finally:
        model.float()


# --- heads on features -----------------------------------------------------------------------


def a_step(state, *, flush: bool = False) -> Step:
    return Step(
        Config.fast(TopR(1)), state, [TopR(1)] * len(state), [flush] * len(state),
        {"backbone": TokenLayout(GRID)},
    )  # fmt: skip


@torch.no_grad()
def run_heads(model: ViTDet, state, image: Tensor, *, flush: bool = False):
    step = a_step(state, flush=flush)
    maps = model.pyramid.step_forward(HeadMemory(step, "pyramid"), image)
    found = model.rpn.step_forward(HeadMemory(step, "rpn"), maps)
    return [part.clone() for part in maps], found, maps.changed, step


@torch.no_grad()
def assert_dense(model: ViTDet, image: Tensor, maps, found) -> None:
    expected = model.pyramid(image)
    predictions = model.rpn(expected)
    for one, other in zip(maps, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    for name in ("logits", "codes", "anchors"):
        for one, other in zip(getattr(found, name), getattr(predictions, name), strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


def a_state(kind: str, streams: int = 2):
    if kind == "rows":
        return RowState(streams)
    state = SlotState(SlotPool(), [3, 1, 0][:streams], [0] * streams)
    state.pool.acquire(4)
    state.slots = torch.tensor(state.rows)
    return state


@pytest.mark.parametrize("kind", ["rows", "slots"])
@pytest.mark.parametrize("seed", range(2))
def test_any_pattern_of_change_is_dense(model, kind, seed):
    state, levels = a_state(kind), pyramid_levels(GRID)
    draw = torch.Generator().manual_seed(seed)
    image = torch.randn(2, 32, *GRID, generator=draw)
    run_heads(model, state, image, flush=True)
    for share in (0.02, 0.0, 0.1, 0.02, 0.6, 0.05, 1.0, 0.02):
        before = {name: state[name].clone() for name in ("pyramid/maps", "rpn/out")}
        wanted = torch.rand(2, *GRID, generator=draw) < share
        image = torch.where(wanted[:, None], torch.randn(image.shape, generator=draw), image)
        maps, found, changed, _ = run_heads(model, state, image)
        assert torch.equal(changed, wanted)
        assert_dense(model, image, maps, found)
        for name, reach in (("pyramid/maps", 1), ("rpn/out", 3)):
            kept = ~ops.changed_pixels(changed, levels, SCALES, reach)
            assert torch.equal(state[name][kept], before[name][kept])


@pytest.mark.parametrize("share", [0.0, 2.0], ids=["always dense", "never dense"])
def test_the_share_beyond_which_a_level_runs_dense_does_not_matter(model, share, monkeypatch):
    monkeypatch.setattr(eager_maps, "DENSE_SHARE", share)
    state, image = a_state("rows"), make(2, 32, *GRID)
    run_heads(model, state, image, flush=True)
    image = image.clone()
    image[0, :, 3, 8] += 1
    before = state["pyramid/maps"].clone()
    maps, found, changed, _ = run_heads(model, state, image)
    assert_dense(model, image, maps, found)
    kept = ~ops.changed_pixels(changed, pyramid_levels(GRID), SCALES, 1)
    assert torch.equal(state["pyramid/maps"][kept], before[kept])


def test_a_change_of_bits_alone_counts(model):
    state, image = a_state("rows", 1), make(1, 32, *GRID)
    image[0, 3, 2, 2] = 0.0
    run_heads(model, state, image, flush=True)
    image[0, 3, 2, 2] = -0.0
    changed = run_heads(model, state, image)[2]
    assert changed.sum() == 1


@pytest.mark.parametrize("kind", ["rows", "slots"])
def test_what_a_bad_frame_wrote_is_gone(model, kind):
    state, image = a_state(kind), make(2, 32, *GRID)
    run_heads(model, state, image, flush=True)
    names = [f"pyramid/{n}" for n in ("reference", "pre", "maps", "turn")]
    names += ["rpn/mid", "rpn/out", "rpn/seen"]
    before = {name: state[name].clone() for name in names}
    worse = image.clone()
    worse[0, :, 2:4] = torch.nan
    worse[1, :, 5] += 1
    state.begin()
    state.accept(torch.tensor([False, True]))
    run_heads(model, state, worse)
    if kind == "rows":
        state.rollback()
        rows = [0, 1]
    else:
        state.good, rows = None, [0]
        assert not torch.equal(state["rpn/out"][1], before["rpn/out"][1])
    for name in names:
        assert torch.equal(state[name][rows], before[name][rows]), name
    image[0, :, 0, 0] += 1
    image[1] = worse[1]
    maps, found, *_ = run_heads(model, state, image)
    assert_dense(model, image, maps, found)


def test_a_first_frame_that_fails_leaves_nothing(model):
    state = a_state("rows")
    state.begin()
    run_heads(model, state, make(2, 32, *GRID), flush=True)
    state.rollback()
    assert not state.tensors


# --- streams ---------------------------------------------------------------------------------


def backbone_image(stream: Stream | StreamBatch) -> Tensor:
    held = stream._state.detached().tensors
    return held["backbone.blocks.1/output"].transpose(1, 2).unflatten(2, GRID)


def predictions_of(stream: Stream | StreamBatch) -> Tensor:
    return stream._state.detached().tensors["rpn/out"]


@torch.no_grad()
def assert_heads(model: ViTDet, stream: Stream | StreamBatch) -> None:
    """The heads' memory is what the dense heads make of the backbone's memory."""
    held, levels = stream._state.detached().tensors, pyramid_levels(GRID)
    maps = model.pyramid(backbone_image(stream))
    found = model.rpn(maps)
    for level, part in enumerate(maps):
        kept = levels.part(held["pyramid/maps"], level)
        torch.testing.assert_close(kept.permute(0, 3, 1, 2), part, **CLOSE)
        logits = levels.part(held["rpn/out"], level)[..., :3].flatten(1)
        torch.testing.assert_close(logits, found.logits[level], **CLOSE)


def test_a_stream_has_the_heads_of_its_features(model, path):
    stream = Stream(eventful.convert(model, Config.fast(fallback=False)))
    shares = []
    for frame in moving_square(4, SIZE, noise=0.01):
        (found,) = stream(frame)
        assert_heads(model, stream)
        shares.append(stream.last.head_macs / stream.last.dense_head_macs)
        with torch.no_grad():
            maps = model.pyramid(backbone_image(stream))
            (dense,) = model.detect(maps, [SIZE])
        torch.testing.assert_close(found.boxes, dense.boxes, rtol=1e-3, atol=1e-3)
    assert shares[0] == 1
    assert 0 < shares[-1] < 0.7
    assert stream.last.macs < stream.last.dense_macs


def test_a_still_scene_costs_the_heads_nothing(model, path):
    config = Config.fast(TopR(0), fallback=False, max_age=None)
    stream = Stream(eventful.convert(model, config))
    frame = moving_square(1, SIZE)[0]
    stream(frame)
    before = predictions_of(stream).clone()
    stream(frame)
    maps = [name for name in stream.last.heads if name != "heads"]
    assert sorted(maps) == ["pyramid", "rpn"]
    works = [work for name in maps for work in stream.last.heads[name].values()]
    assert sum(int(work.computed.sum()) for work in works) == 0
    assert (stream.last.head_macs == 0) == (path == "host")  # a device computes every region
    assert torch.equal(predictions_of(stream), before)


def test_regions_keep_their_outputs_on_the_host(model, monkeypatch):
    """Of a scene that stands still but for a corner some regions are computed, not all."""
    stream = Stream(
        eventful.convert(model, Config.fast(fallback=False, max_age=None, motion=False))
    )
    frame = moving_square(1, SIZE)[0]
    other = frame.clone()
    other[..., :32, :32] += 2
    stream(frame)
    (found,) = stream(other)
    (work,) = stream.last.heads["heads"].values()
    assert 0 < int(work.computed.sum()) < work.pixels
    with torch.no_grad():
        (dense,) = model.detect(model.pyramid(backbone_image(stream)), [SIZE])
    torch.testing.assert_close(found.boxes, dense.boxes, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.scores, dense.scores, **CLOSE)
    assert torch.equal(found.labels, dense.labels)


def test_gates_around_blocks(model):
    config = Config(TopR(4), gating="block", protect=False)
    stream = Stream(eventful.convert(model, config))
    for frame in moving_square(4, SIZE):
        stream(frame)
        assert_heads(model, stream)
    assert stream.last.head_macs < stream.last.dense_head_macs


def test_other_gatings_and_the_model_outside_a_stream_are_the_original(model):
    frame = moving_square(1, SIZE)[0]
    for config in (Config.exact(), Config.fast()):
        converted = eventful.convert(model, config)
        with torch.no_grad():
            one, other = converted.features(frame), model.features(frame)
            assert all(map(torch.equal, one, other))
            one, other = converted.rpn(one), model.rpn(other)
        assert all(map(torch.equal, one.logits + one.codes, other.logits + other.codes))
        stream = Stream(converted)
        stream(frame)
        assert ("pyramid/maps" in stream._state) == (config.gating == "frame")
        assert bool(stream.last.dense_head_macs) == (config.gating == "frame")


def test_streams_in_a_batch_are_those_alone(model, path):
    converted = eventful.convert(model, Config.fast(fallback=False))
    batch, alone = StreamBatch(converted), {}
    clips = {name: moving_square(4, SIZE, seed=seed) for seed, name in enumerate("abc")}
    for time in range(4):
        if time < 3:  # others join later, and flush in a pass of their own
            name = "abc"[len(alone)]
            batch.join(name)
            alone[name] = Stream(converted)
        if time == 3:
            for name, stream in alone.items():
                batch.flush(name)
                stream.flush()
        batch(torch.cat([clips[name][time] for name in alone]))
        assert_heads(model, batch)
        for row, (name, stream) in enumerate(alone.items()):
            stream(clips[name][time])
            torch.testing.assert_close(
                predictions_of(batch)[row : row + 1], predictions_of(stream), rtol=1e-3, atol=1e-3
            )
    assert batch.last.head_macs == batch.last.dense_head_macs


def test_a_bad_frame_and_a_failure_behind_the_heads_change_nothing(model, monkeypatch):
    stream = Stream(eventful.convert(model, Config.fast(fallback=False)))
    clip = moving_square(4, SIZE)
    stream(clip[0])
    before = {name: tensor.clone() for name, tensor in stream._state.tensors.items()}
    with pytest.raises(errors.NonFiniteError):
        stream(torch.full_like(clip[1], torch.nan))

    def fail(*args):
        raise ArithmeticError("behind the heads")

    with monkeypatch.context() as patch:
        patch.setattr("eventful.models.vitdet.found.Found.of", fail)
        with pytest.raises(ArithmeticError):
            stream(clip[1])
    after = stream._state.tensors
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7)) for name in after)
    stream(clip[2])
    assert_heads(model, stream)


def test_a_bad_frame_on_the_device_path(model, monkeypatch):
    monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    converted = eventful.convert(model, Config.fast(fallback=False))
    batch, clip = StreamBatch(converted), moving_square(5, SIZE, batch=2)
    batch.join("good")
    batch.join("bad")
    batch(clip[0])
    before = predictions_of(batch).clone()
    frames = clip[1].clone()
    frames[1] = torch.nan
    batch(frames)
    assert torch.equal(predictions_of(batch)[1], before[1])
    assert not torch.equal(predictions_of(batch)[0], before[0])
    with pytest.raises(errors.NonFiniteError):
        batch(clip[2])
    batch(clip[3])
    assert_heads(model, batch)


def test_maps_taken_away_stay_and_what_the_proposals_missed_is_made_up_for(model, path):
    stream = Stream(eventful.convert(model, Config.fast(fallback=False)))
    clip = moving_square(5, SIZE)
    stream(clip[0])
    maps = stream.call("features", clip[2])
    kept = [part.clone() for part in maps]
    stream(clip[4])
    assert all(map(torch.equal, maps, kept))
    assert_heads(model, stream)


def test_a_snapshot_holds_the_maps(model, path):
    converted = eventful.convert(model, Config.fast(fallback=False))
    stream, clip = Stream(converted), moving_square(4, SIZE)
    for frame in clip[:2]:
        stream(frame)
    other = Stream.load(converted, stream.snapshot())
    for one in (stream, other):
        one(clip[2])
        assert_heads(model, one)
    assert other.last.head_macs == stream.last.head_macs < stream.last.dense_head_macs
    assert torch.equal(predictions_of(other), predictions_of(stream))


def test_a_cut_recomputes_everything(model):
    stream = Stream(eventful.convert(model, Config.fast(fallback=False)))
    for frame in [*moving_square(4, SIZE), *moving_square(1, SIZE, seed=9)]:
        stream(frame)
    assert all(stream.last.flushed)
    assert stream.last.head_macs == stream.last.dense_head_macs
    assert_heads(model, stream)


def test_what_heads_hold_is_counted(model):
    stream = Stream(eventful.convert(model, Config.fast()))
    stream(moving_square(1, SIZE)[0])
    held = stream._state.tensors
    heads = sum(
        t.nbytes for name, t in held.items() if name.startswith(("pyramid/", "rpn/", "heads/"))
    )
    assert heads == head_bytes(model, GRID, Config.fast(), torch.float32)
    assert eventful.inspect(model, SIZE).state_bytes["fast"] == stream.nbytes
    assert head_bytes(model, GRID, Config.exact(), torch.float32) == 0


@pytest.mark.parametrize("size", [672, 1024])
def test_heads_hold_no_more_than_the_backbone(size):
    with torch.device("meta"):
        large = eventful.models.vitdet.vitdet_b(size=size)
    both = eventful.inspect(large, size).state_bytes["fast"]
    grid = (size // 16, size // 16)
    assert 2 * head_bytes(large, grid, Config.fast(), torch.float32) <= both


def test_written_weights_of_a_head_are_noticed(model):
    converted = eventful.convert(model, Config.fast())
    stream, frame = Stream(converted), moving_square(1, SIZE)[0]
    stream(frame)
    with torch.no_grad():
        model.rpn.convs[0].bias.add_(0)
    with pytest.raises(errors.WeightsChangedError):
        stream(frame)
    stream.reset()
    stream(frame)


def test_a_hook_inside_a_head_is_called(model):
    converted = eventful.convert(model, Config.fast(fallback=False))
    seen = []
    handle = converted.pyramid.p3[2].register_forward_hook(lambda *call: seen.append(call))
    stream = Stream(converted)
    stream(moving_square(1, SIZE)[0])
    assert len(seen) == 1
    assert "pyramid/maps" not in stream._state
    handle.remove()
    stream(moving_square(1, SIZE)[0])
    assert_heads(model, stream)


def test_autocast_runs_the_original_heads(model):
    stream = Stream(eventful.convert(model, Config.fast(fallback=False)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream(moving_square(1, SIZE)[0])
    assert "pyramid/maps" not in stream._state


def test_maps_of_a_step_are_a_list(model):
    state, image = a_state("rows", 1), make(1, 32, *GRID)
    step = a_step(state, flush=True)
    with torch.no_grad():
        maps = model.pyramid.step_forward(HeadMemory(step, "pyramid"), image)
        assert isinstance(maps, UpdatedMaps)
        assert isinstance(maps, list)
        assert model.rpn.step_forward(HeadMemory(step, "rpn"), list(maps)) is None
        assert model.pyramid.step_forward(HeadMemory(step, "pyramid"), image[..., 1:]) is None


# --- refresh in turn -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "period"),
    [
        (TokenLayout((64, 64)), 118),
        (TokenLayout((7, 9), prefix=1, suffix=2), 5),
        (TokenLayout((5, 4)), 99),
        (TokenLayout((14, 14), prefix=1), 1),
    ],
    ids=str,
)
def test_tokens_of_a_turn_lie_together(layout, period):
    phase = layout.phases(period)
    counts = torch.bincount(phase.long(), minlength=period)
    assert counts.sum() == layout.tokens
    assert counts.max() <= -(-layout.tokens // period)
    assert counts.max() - counts.min() <= 1
    grid = phase[layout.prefix : layout.tokens - layout.suffix].view(layout.grid)
    band = max(1, round((layout.tokens / period) ** 0.5))
    spans = []
    for turn in range(period):
        places = (grid == turn).nonzero()
        if len(places):
            spans.append((places.amax(0) - places.amin(0) + 1).tolist())
    compact = [span for span in spans if max(span) <= 2 * band + 1]
    assert len(compact) >= len(spans) - 2 * -(-layout.grid[0] // band)  # but where a band ends


@pytest.mark.parametrize("gating", ["frame", "block"])
def test_every_token_is_refreshed_once_in_a_period(model, gating, path):
    config = Config(TopR(0), gating=gating, max_age=9)
    stream = Stream(eventful.convert(model.backbone, config), maps=True)
    frame = moving_square(1, SIZE)[0]
    stream(frame)
    period = 6  # of 2 blocks
    masks = []
    for _ in range(2 * period):
        stream(frame)
        masks.append(stream.last.mask[0])
    assert torch.stack(masks[:period]).sum(dim=0).eq(1).all()
    assert torch.equal(torch.stack(masks[:period]), torch.stack(masks[period:]))


# --- regions ---------------------------------------------------------------------------------


def some_boxes(count: int, seed: int) -> Tensor:
    corner = (make(2, count, 2, seed=seed).sigmoid() * 1.2 - 0.1) * torch.tensor([SIZE[1], SIZE[0]])
    side = 2 ** (3 + 7 * make(2, count, 1, seed=seed + 1).sigmoid())
    return torch.cat([corner, corner + side], dim=-1)  # on every level, some partly outside


def test_regions_are_kept_where_nothing_they_read_changed():
    levels, boxes = pyramid_levels(GRID), some_boxes(60, 3)
    order = torch.randperm(60)
    maps = [make(2, 4, *size, seed=9) for size in levels.sizes]
    changed = make(2, levels.pixels, seed=4) > 2.7
    moved = [
        part + levels.part(changed[..., None], level).permute(0, 3, 1, 2)
        for level, part in enumerate(maps)
    ]
    found = kept_regions(boxes[:, order], boxes, changed, levels)
    kept = found >= 0
    assert torch.equal(found[kept], order.expand(2, -1)[kept])
    every = Padded(boxes[:, order], torch.ones(2, 60, dtype=torch.bool))
    one, other = (pool_regions(m[:4], every, 7) for m in (maps, moved))
    same = (one == other).flatten(1).all(dim=1).view(2, -1)
    assert not (kept & ~same).any()
    assert 20 < same.sum() < 115
    assert kept.sum() > 0.8 * same.sum()
    level = pyramid_level(boxes[:, order].flatten(0, 1), 2, 5).view(2, -1)
    assert set(level[kept].tolist()) == {2, 3, 4, 5}


def test_regions_of_another_box_or_frame_are_computed():
    levels, boxes = pyramid_levels(GRID), some_boxes(4, 3)
    still = torch.zeros(2, levels.pixels, dtype=torch.bool)
    none = torch.full((2, 4), -1)
    every = torch.arange(4).expand(2, -1)
    assert torch.equal(kept_regions(boxes, boxes, still, levels), every)
    assert torch.equal(kept_regions(boxes + 1, boxes, still, levels), none)
    assert torch.equal(kept_regions(boxes, boxes[:, :0], still, levels), none)
    nudged = boxes.clone()
    nudged[0, 1, 2] = torch.nextafter(nudged[0, 1, 2], torch.tensor(1e9))
    assert (kept_regions(nudged, boxes, still, levels) < 0).sum() == 1


def test_places_without_a_region_match_nothing(model):
    """In a cascade a region may be refined to the box that stands for no region."""
    step = Step(Config.fast(), RowState(1), [], [False], {})
    levels = pyramid_levels(GRID)
    still = torch.zeros(1, levels.pixels, dtype=torch.bool)
    made = []

    def compute(regions: Padded) -> tuple[Tensor, Tensor]:
        made.append(int(regions.valid.sum()))
        sums = regions.boxes.sum(dim=-1).flatten(0, 1)[:, None]
        return sums + 7, sums[..., None].expand(-1, 1, 4)

    box = torch.tensor([1.0, 2, 8, 9])
    for boxes, valid in (
        (torch.stack([box, 0 * box])[None], torch.tensor([[True, False]])),
        (torch.stack([box, 0 * box])[None], torch.tensor([[True, True]])),
        (torch.stack([box, 0 * box])[None], torch.tensor([[True, True]])),
    ):
        memory = RegionMemory(HeadMemory(step, "heads"), still, levels)
        logits, _ = memory.stage("stage 0", Padded(boxes, valid), compute, 1)
    assert logits.tolist() == [[27.0], [7.0]]
    assert made == [1, 1]  # nothing in the third frame


def test_maps_that_a_caller_keeps_do_not_change(model):
    """Only a whole ViTDet, which neither keeps nor writes them, sees the memory itself."""

    class Maps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.pyramid = model.backbone, SimpleFeaturePyramid(32, 16).eval()

        def forward(self, image: Tensor) -> list[Tensor]:
            return list(self.pyramid(self.backbone(image)))

    stream = Stream(eventful.convert(Maps().eval(), Config.fast(fallback=False)))
    clip = moving_square(2, SIZE)
    first = stream(clip[0])
    kept = [part.clone() for part in first]
    stream(clip[1])
    assert all(map(torch.equal, first, kept))


# --- a head of one's own (docs/heads.md) -----------------------------------------------------


class OneConvolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(32, 5, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image)

    def step_forward(self, memory: HeadMemory, image: Tensor) -> Tensor | None:
        grid = (image.shape[2], image.shape[3])
        if not memory.takes(len(image), grid, image) or not plain_parts(self, (torch.nn.Conv2d,)):
            return None
        tokens = image.flatten(2).transpose(1, 2)
        changed = memory.compare(tokens).unflatten(1, grid)
        levels, scales = MapLevels((grid,)), (1.0,)
        layer = memory.constant(
            "conv", lambda: MapLayer(conv_taps(self.conv)[None], self.conv.bias[None])
        )
        reached = ops.changed_pixels(changed, levels, scales, 1)
        memory.update("map", memory.state.raw(memory.slot("reference")), layer, reached, levels)
        return levels.part(memory.maps("map").clone(), 0).permute(0, 3, 1, 2)

    def step_bytes(self, grid: tuple[int, int], dtype: torch.dtype) -> int:
        return grid[0] * grid[1] * 37 * dtype.itemsize + 8


def test_a_head_of_ones_own(model, path):
    torch.manual_seed(1)
    both = torch.nn.Sequential(model.backbone, OneConvolution()).eval()
    stream = Stream(eventful.convert(both, Config.fast(fallback=False)))
    for frame in moving_square(4, SIZE):
        found = stream(frame)
        held = stream._state.detached().tensors["0.blocks.1/output"]
        with torch.no_grad():
            dense = both[1](held.transpose(1, 2).unflatten(2, GRID))
        torch.testing.assert_close(found, dense, **CLOSE)
    assert 0 < stream.last.head_macs < stream.last.dense_head_macs
    heads = stream._state.detached().tensors
    total = sum(tensor.nbytes for name, tensor in heads.items() if name.startswith("1/"))
    assert total == both[1].step_bytes(GRID, torch.float32)


def test_a_stream_that_flushes_beside_others_computes_everything(model):
    state, image = a_state("rows"), make(2, 32, *GRID)
    run_heads(model, state, image, flush=True)
    step = a_step(state)
    step.flush([True, False])
    with torch.no_grad():
        maps = model.pyramid.step_forward(HeadMemory(step, "pyramid"), image)
    assert maps.changed.flatten(1).sum(dim=1).tolist() == [GRID[0] * GRID[1], 0]
