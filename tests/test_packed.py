"""Packed rows: the same results as rows padded to the busiest stream, with less work."""

from __future__ import annotations

import pytest
import torch

import eventful
import zoo_timm
import zoo_transformers
from backends import DEVICE, TRITON
from clips import moving_square
from eventful import Config, FollowScene, Shared, StreamBatch, TopR, ops
from eventful.engine.plan import ResidentPlan
from eventful.engine.widths import Counts, rows_of
from eventful.rules import block
from eventful.tokens.packing import Packing
from eventful.tokens.selection import Selection
from tolerances import assert_near

FAMILIES = {
    "vit": zoo_timm.ZOO["vit"],
    "dinov2": zoo_timm.ZOO["dinov2"],  # layer scales
    "eva02": zoo_timm.ZOO["eva02"],  # rotary position
    "eva_mixed": zoo_timm.ZOO["eva_mixed"],  # by head
    "dinov3": zoo_transformers.ZOO["dinov3"],  # rotary position, kept for the last index
    "yolos": zoo_transformers.ZOO["yolos"],  # positions added between blocks
    "sam": zoo_timm.ZOO["sam"],  # windows and relative position
    "vitdet": zoo_transformers.ZOO["vitdet"],
}
OPTIONS = {
    "fast": {},
    "bare": {"context": None, "motion": False, "max_age": None, "protect": False},
    "after norm": {"gate": "after-norm", "motion": False},
}
POLICIES = [TopR(2), TopR(11), TopR(0), TopR(1)]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["host", "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])])
def device(request, monkeypatch, full_precision):
    """Where steps run: on the host, or without it, on the CPU or a GPU."""
    resident = set() if request.param == "host" else {request.param}
    monkeypatch.setattr("eventful.engine.plan.DEVICES", resident)
    return "cpu" if request.param == "host" else request.param


def being_recorded() -> bool:
    """Whether a step is being recorded as a CUDA graph; it cannot be asked then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@pytest.fixture
def rows_seen(monkeypatch):
    """Shapes of the tokens that blocks ran on in steps with packed rows."""
    seen, whole = [], block._whole

    def spy(spec, step, tokens, chosen, positions, packing=None):
        if packing is not None and not being_recorded():
            seen.append((tuple(tokens.shape[:2]), int(chosen.counts.sum()), chosen.width))
        return whole(spec, step, tokens, chosen, positions, packing)

    monkeypatch.setattr(block, "_whole", spy)
    return seen


def run(entry, clips, device, policies=POLICIES, **options):
    """Outputs, tokens selected and operations of each frame."""
    torch.manual_seed(5)
    config = Config.fast(TopR(1), **{"scene_cut": None, "fallback": False, **options})
    model = eventful.convert(entry.make().to(device), config)
    batch = StreamBatch(model, maps=True, check="sync")
    for number, policy in enumerate(policies):
        batch.join(str(number), policy)
    outputs, masks, macs = [], [], []
    with torch.no_grad():
        for frame in clips:
            outputs.append(entry.output(entry.call(batch, frame.to(device))).clone())
            (gate,) = batch.last.gates.values()
            masks.append(gate.mask.cpu())
            macs.append(batch.last.macs)
    return outputs, masks, macs


def never(monkeypatch):
    """Rows are padded, as they were before there was a packing."""
    monkeypatch.setattr("eventful.tokens.packing.WORTH", 0.0)
    monkeypatch.setattr("eventful.engine.widths.WORTH", 0.0)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_padded_rows(family, options, device, rows_seen, monkeypatch):
    entry = FAMILIES[family]
    clips = moving_square(5, entry.size, batch=4, noise=0.1)
    packed = run(entry, clips, device, **OPTIONS[options])
    assert rows_seen
    assert all(shape[0] == 1 for shape, _, _ in rows_seen)
    rows_seen.clear()
    never(monkeypatch)
    padded = run(entry, clips, device, **OPTIONS[options])
    assert not rows_seen
    assert all(torch.equal(a, b) for a, b in zip(packed[1], padded[1], strict=True))
    assert packed[2] == padded[2]  # operations
    for time, (a, b) in enumerate(zip(packed[0], padded[0], strict=True)):
        assert_near(a, b, "operation" if family in ("sam", "vitdet") else "step", f"frame {time}")


@pytest.mark.parametrize("family", ["vit", "vitdet_plain"])
def test_pooled_keys(family, rows_seen, monkeypatch):
    entry = {**zoo_timm.ZOO, **zoo_transformers.ZOO}[family]
    clips = moving_square(5, entry.size, batch=4, noise=0.1)
    packed = run(entry, clips, "cpu", pool=2)
    assert rows_seen
    never(monkeypatch)
    padded = run(entry, clips, "cpu", pool=2)
    assert packed[2] == padded[2]
    for a, b in zip(packed[0], padded[0], strict=True):
        assert_near(a, b, "operation")


def test_a_picture_that_moves(device, rows_seen, monkeypatch):
    """References and outputs are carried along the motion before packed rows are written."""
    entry = FAMILIES["vit"]
    draw = torch.Generator().manual_seed(0)
    scene = torch.randn(4, 3, 8, 10, generator=draw)
    scene = torch.nn.functional.interpolate(scene, scale_factor=8, mode="bicubic")
    high, wide = entry.size
    clips = [scene[..., 2 * t : 2 * t + high, 3 * t : 3 * t + wide] for t in range(5)]
    moved, follow = [], block.follow_motion

    def spy(step, spec, tokens):
        content = follow(step, spec, tokens)
        if not being_recorded():
            moved.append(bool(step.motions and step.motions[spec.trunk].any()))
        return content

    monkeypatch.setattr(block, "follow_motion", spy)
    packed = run(entry, clips, device)
    assert rows_seen
    assert any(moved)
    never(monkeypatch)
    padded = run(entry, clips, device)
    assert all(torch.equal(a, b) for a, b in zip(packed[1], padded[1], strict=True))
    for a, b in zip(packed[0], padded[0], strict=True):
        assert_near(a, b, "step")


def test_only_real_rows_run_on_the_host(rows_seen):
    entry = FAMILIES["vit"]
    run(entry, moving_square(4, entry.size, batch=4, noise=0.1), "cpu")
    assert rows_seen
    for (_, rows), count, width in rows_seen:
        assert rows == count < 0.75 * 4 * width


def test_tapped_layers(device, rows_seen, monkeypatch):
    """Outputs of inner layers are whole again, and the rows behind them are packed again."""
    entry = FAMILIES["vit"]
    clips = moving_square(4, entry.size, batch=4, noise=0.1)

    def taps():
        torch.manual_seed(5)
        model = eventful.convert(entry.make().to(device), Config.fast(TopR(1), fallback=False))
        batch = StreamBatch(model, check="sync")
        for number, policy in enumerate(POLICIES):
            batch.join(str(number), policy)
        with torch.no_grad():
            frames = (frame.to(device) for frame in clips)
            return [batch.call("forward_intermediates", frame, indices=[0, 1]) for frame in frames]

    packed = taps()
    assert rows_seen
    never(monkeypatch)
    for (last, inner), (last_padded, inner_padded) in zip(packed, taps(), strict=True):
        assert_near(last, last_padded, "step")
        for a, b in zip(inner, inner_padded, strict=True):
            assert_near(a, b, "step")


def test_equal_counts_are_not_packed(device, rows_seen):
    entry = FAMILIES["vit"]
    run(entry, moving_square(3, entry.size, batch=4), device, policies=[TopR(5)] * 4)
    run(entry, moving_square(3, entry.size), device, policies=[TopR(5)])
    assert not rows_seen


def test_a_failed_step_is_undone(monkeypatch):
    """On the host, packed writes are rolled back bit for bit."""
    entry = FAMILIES["vit"]
    clips = moving_square(4, entry.size, batch=4, noise=0.1)
    torch.manual_seed(5)
    model = eventful.convert(entry.make(), Config.fast(TopR(1), fallback=False))
    batch = StreamBatch(model)
    for number, policy in enumerate(POLICIES):
        batch.join(str(number), policy)
    batch(clips[0])
    batch(clips[1])
    before = {name: batch._state[name].clone() for name in batch._state.names()}

    def fail(*args):
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(block, "_check_sound", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            batch(clips[2])
    for name, kept in before.items():
        assert torch.equal(kept.nan_to_num(7), batch._state[name].nan_to_num(7)), name


class TestPacking:
    selection = Selection(
        torch.tensor([[4, 4, 4], [1, 2, 5], [0, 0, 0], [3, 6, 3]]), 7, torch.tensor([1, 3, 0, 2])
    )

    @pytest.mark.parametrize("rows", [None, 6, 9])
    def test_there_and_back(self, rows):
        packing = Packing.of(self.selection, rows)
        values = torch.randn(4, 7, 2)
        slots = self.selection.gather(values)
        packed = packing.pack(slots)
        assert packing.index[0, :6].tolist() == [4, 1, 2, 5, 3, 6]
        assert torch.equal(packing.take(values)[:, :6], packed[:, :6])
        back = packing.unpack(packed)
        for stream in (0, 1, 3):
            assert torch.equal(back[stream], slots[stream])  # the padding too

    def test_rows_of_each_stream(self):
        found = Packing.of(self.selection).streams()
        assert [(stream, index[0].tolist()) for stream, _, index in found] == [
            (0, [4]), (1, [1, 2, 5]), (3, [3, 6]),
        ]  # fmt: skip

    @pytest.mark.parametrize("whole", [True, False])
    def test_rows_are_written_without_padding(self, whole):
        target = Packing.of(self.selection).target
        memory = torch.zeros(4, 7, 2) if whole else torch.zeros(7, 4, 2).transpose(0, 1)
        rows = torch.randn(1, 6, 2)
        target.scatter_(memory, rows)
        assert torch.equal(memory[[0, 1, 1, 1, 3, 3], [4, 1, 2, 5, 3, 6]], rows[0])
        assert torch.equal(target.gather(memory), rows)
        assert (memory != 0).any(dim=-1).sum() == 6

    def test_not_worth_it(self):
        full = Selection(torch.tensor([[0, 1], [1, 1]]), 4, torch.tensor([2, 2]))
        assert Packing.of(full) is None
        nothing = Selection(torch.tensor([[0, 1], [1, 1]]), 4, torch.tensor([0, 0]))
        assert Packing.of(nothing) is None
        assert Packing.of(Selection.everything(4, 9, "cpu")) is None
        assert Packing.of(Selection.everything(4, 9, "cpu"), 12) is None


class TestFitRows:
    def picked(self, *counts):
        error = torch.rand(len(counts), 12)
        zeros = torch.full((len(counts),), -torch.inf)
        rule = ops.PickRule(zeros, torch.tensor(counts))
        report = torch.zeros(len(counts), ops.REPORT, dtype=torch.int32)
        return ops.pick(error, rule, 8, report)

    def test_all_fit(self):
        picked = self.picked(3, 8, 0)
        fitted = ops.fit_rows(picked, 11)
        for name in ("index", "count", "places"):
            assert torch.equal(getattr(picked, name), getattr(fitted, name))

    def test_the_busiest_wait(self):
        picked = self.picked(3, 8, 0, 6)
        fitted = ops.fit_rows(picked, 12)
        assert fitted.count.tolist() == [3, 4, 0, 4]
        assert torch.equal(fitted.index[1, :4], picked.index[1, :4])
        assert (fitted.index[1, 4:] == picked.index[1, 0]).all()
        assert (fitted.places >= 0).sum(dim=1).tolist() == [3, 4, 0, 4]
        assert ops.fit_rows(picked, 0).count.tolist() == [0, 0, 0, 0]


def resident(*policies):
    return ResidentPlan([policy.params(1000) for policy in policies], 1000, 3, (False,) * 3)


class TestRows:
    def test_a_pool_always_fits(self):
        plan = resident(*[Shared(0.1)] * 8)
        for counts in (Counts(700, 700), None):
            rows = rows_of(plan, [counts, *[Counts(20, 20)] * 7], 768, steady=False)
            assert 8 * 103 <= rows <= 1.25 * 8 * 103

    def test_a_scene_takes_its_last_counts(self):
        plan = resident(*[FollowScene(max_fraction=0.5)] * 8)
        known = [Counts(400, 400), *[Counts(20, 20)] * 7]
        rows = rows_of(plan, known, 448, steady=False)
        assert 540 * 1.125 <= rows <= 768
        assert rows_of(plan, [*known[:7], None], 448, steady=False) > rows
        assert rows_of(plan, known, 448, steady=True) is None  # each may take half

    def test_not_worth_it(self):
        plan = resident(*[TopR(100)] * 4)
        assert rows_of(plan, [None] * 4, 112, steady=False) is None
        assert rows_of(resident(Shared(0.1)), [None], 256, steady=False) is None


def test_what_does_not_fit_waits_on_a_device(monkeypatch, rows_seen):
    """Rows follow the last counts: a stream that wakes up gets its tokens a frame later."""
    monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    monkeypatch.setattr("eventful.engine.widths.bucket", lambda count, tokens, steady=False: count)
    monkeypatch.setattr("eventful.engine.widths.WORTH", 1.0)
    entry = FAMILIES["vit"]
    torch.manual_seed(0)
    still = torch.randn(4, 3, *entry.size)
    clips = [still, still, still]
    for _ in range(3):
        woken = still.clone()
        woken[1] = torch.randn(3, *entry.size)
        clips.append(woken)
    bare = OPTIONS["bare"]
    policies = [TopR(9), FollowScene(floor=0, max_fraction=0.5), TopR(0), TopR(0)]
    _, masks, _ = run(entry, clips, "cpu", policies=policies, **bare)
    counts = [mask.sum(dim=1).tolist() for mask in masks[1:]]
    assert counts[1] == [9, 0, 0, 0]
    assert counts[2] == [4, 4, 0, 0]  # room for nine rows: the busiest wait
    assert counts[3][1] > 4
    assert all(count <= rows for (_, rows), count, _ in rows_seen)


def attention_of(counts, *, backend, lse):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, size, 16, device=DEVICE) for size in (40, 70, 70))
    count = torch.tensor(counts, device=DEVICE)
    run = ops.attend_lse if lse else ops.attend
    with ops.use_backend(backend):
        found = run(q, k, v, 0.25, ragged=ops.Ragged(count, sum(counts)))
    found = found if lse else (found,)
    return [part[b, :, :number] for part in found for b, number in enumerate(counts)]


@pytest.mark.triton
@pytest.mark.skipif(not TRITON, reason="needs CUDA or TRITON_INTERPRET=1")
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("counts", [(40, 0, 3), (1, 17, 16)])
def test_the_kernel_leaves_padding_out(counts, lse):
    found = attention_of(counts, backend="triton", lse=lse)
    expected = attention_of(counts, backend="reference", lse=lse)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
