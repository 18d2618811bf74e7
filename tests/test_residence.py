"""Steps that never ask the host: equal to plain steps, and memory in slots.

They are the rule on CUDA. Here they run on the CPU too, through the reference operations and
without recorded graphs; `-m gpu` runs the same laws with graphs on a device.
"""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

import eventful
import zoo_timm
from clips import moving_square
from eventful import Config, NoiseThreshold, Stream, StreamBatch, Threshold, TopFraction, TopR, ops
from eventful.engine.widths import bucket
from eventful.memory.slots import SlotState
from resident import RULES, device, entry, near, outputs, vit  # noqa: F401
from simulated import clip_of, large_vit
from tolerances import assert_near


@pytest.mark.parametrize("policy", [TopFraction(0.3), TopR(0), Threshold(0.8)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"max_age": None, "scene_cut": None}], ids=["fast", "bare"]
)
def test_equals_plain_steps(entry, device, policy, options, monkeypatch):
    """Same tokens, same outputs: a threshold's bucket is never too small here."""
    monkeypatch.setattr("eventful.engine.widths._FIRST_SHARE", 1.0)
    monkeypatch.setattr("eventful.engine.widths._MARGIN", 100.0)
    model = eventful.convert(entry.make().to(device), Config.fast(policy, **options))
    clip = moving_square(7, entry.size, noise=0.02)
    resident = Stream(model, maps=True)
    got = outputs(entry, resident, clip, device)
    assert isinstance(resident._state, SlotState)
    with monkeypatch.context() as patch:
        patch.setattr("eventful.engine.plan.DEVICES", set())
        usual = Stream(model, maps=True)
        expected = outputs(entry, usual, clip, device)
        assert not isinstance(usual._state, SlotState)
    # The CPU's attention with a bias and its log-sum-exp adds in an order that depends on the
    # number of queries, which is padded on one of the two paths.
    near(got, expected, device, "operation" if entry is zoo_timm.ZOO["sam"] else "step")
    assert resident.last.updated == usual.last.updated
    assert resident.last.macs == usual.last.macs
    assert torch.equal(resident.last.mask, usual.last.mask)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", [TopFraction(0.3), Threshold(0.5), NoiseThreshold()], ids=str)
def test_other_rules_equal_plain_steps(vit, device, rule, policy, monkeypatch):
    monkeypatch.setattr("eventful.engine.widths._FIRST_SHARE", 1.0)
    monkeypatch.setattr("eventful.engine.widths._MARGIN", 100.0)
    model = eventful.convert(vit.make().to(device), RULES[rule](policy))
    clip = moving_square(7, vit.size, noise=0.02)
    resident = Stream(model)
    got = outputs(vit, resident, clip, device)
    assert isinstance(resident._state, SlotState)
    monkeypatch.setattr("eventful.engine.plan.DEVICES", set())
    usual = Stream(model)
    near(got, outputs(vit, usual, clip, device), device)
    assert resident.last.updated == usual.last.updated
    assert resident.last.macs == usual.last.macs


def test_exact_stays_dense_on_its_buffers(vit, device):
    """Over many frames the kept attention is ordinary attention of the kept q, k and v."""
    model = eventful.convert(vit.make().to(device), Config.exact(TopFraction(0.2)))
    stream = Stream(model)
    for frame in moving_square(60, vit.size, noise=0.3):
        stream(frame.to(device))
    state = stream._detached()
    name = next(n for n in state.names() if n.endswith("/lse")).removesuffix("/lse")
    heads = state[f"{name}/lse"].shape[-1]
    q, k, v = (ops.split_heads(state[f"{name}/{n}"], heads) for n in ("query", "key", "value"))
    scale = q.shape[-1] ** -0.5
    expected = ops.join_heads(ops.attend(q.double(), k.double(), v.double(), scale))
    assert_near(state[f"{name}/attended"], expected, "step")


@pytest.mark.parametrize("rule", [Config.fast, Config.exact])
def test_all_tokens_is_dense(entry, device, rule):
    model = entry.make().to(device)
    stream = Stream(eventful.convert(model, rule(TopR(10**6))))
    clip = moving_square(5, entry.size, noise=0.05)
    near(outputs(entry, stream, clip, device), outputs(entry, model, clip, device), device)


def test_noise_follows_the_scene(vit, device, monkeypatch):
    """The level is the plain policy's; the tokens are the same wherever the bucket suffices."""
    monkeypatch.setattr("eventful.engine.widths._FIRST_SHARE", 1.0)
    monkeypatch.setattr("eventful.engine.widths._MARGIN", 100.0)
    model = eventful.convert(vit.make().to(device), Config.fast(NoiseThreshold(k=2)))
    clip = moving_square(8, vit.size, noise=0.1)
    masks = []
    for devices in ({device}, set()):
        monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
        stream = Stream(model, maps=True)
        kept = []
        for frame in clip:
            stream(frame.to(device))
            kept.append(stream.last.mask)
        masks.append(torch.stack(kept))
    assert torch.equal(*masks)
    assert 0 < masks[0][1:].float().mean() < 0.9


def test_overflow_waits_for_the_next_frame(device):
    """A frame that wants more than the bucket holds takes the largest; the next has room."""
    torch.manual_seed(7)
    size = (64, 64)  # 8 x 8 patches and a class token
    options = {"scene_cut": None, "max_age": None, "protect": False, "context": None}
    config = Config.fast(Threshold(0.5), **options)
    model = eventful.convert(zoo_timm.plain(img_size=size)().to(device), config)
    still = moving_square(1, size)[0]
    changed = still.clone()
    changed[..., : size[1] // 2] += 1.0  # 32 patches
    stream = Stream(model, maps=True)
    counts = []
    for frame in [still, still, still, changed, changed, changed]:
        stream(frame.to(device))
        counts.append(int(stream.last.mask.sum()))
    width = bucket(1, stream.last.mask.shape[1])
    assert width < 32
    assert counts[2:] == [0, width, 32 - width, 0]


class TestSlots:
    def test_streams_share_recorded_work(self, vit, device):
        """Two streams of one model, interleaved, equal two streams on their own."""
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        clips = [moving_square(6, vit.size, noise=0.05, seed=s) for s in (1, 2)]
        alone = [outputs(vit, Stream(model), clip, device) for clip in clips]
        streams = [Stream(model), Stream(model)]
        mixed = [[], []]
        for t in range(6):
            for i in (0, 1):
                mixed[i] += outputs(vit, streams[i], [clips[i][t]], device)
        slots = {stream._state.rows[0] for stream in streams}
        assert len(slots) == 2
        assert streams[0]._executor.store is streams[1]._executor.store
        near(mixed[0] + mixed[1], alone[0] + alone[1], device)

    def test_one_recording_serves_a_stream_that_left_and_rejoined(self, vit, device):
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        clips = {n: moving_square(9, vit.size, noise=0.05, seed=i) for i, n in enumerate("abc")}
        expected = {n: outputs(vit, Stream(model), clip, device) for n, clip in clips.items()}
        batch = StreamBatch(model)
        for name in "ab":
            batch.join(name)

        def step(t, *names):
            frames = torch.cat([clips[n][t] for n in names]).to(device)
            with torch.no_grad():
                got = vit.output(batch(frames, streams=names))
            near(list(got.split(1)), [expected[n][t] for n in names], device)

        for t in range(4):
            step(t, "a", "b")
        residence = batch._executor.store
        works = dict(residence.shapes)
        batch.leave("b")
        step(4, "a")
        batch.join("c")
        clips["c"] = clips["c"][:5] + clips["c"]  # its frame 0 comes at t = 5
        expected["c"] = [None] * 5 + expected["c"]
        for t in range(5, 9):
            step(t, "c", "a")
        assert {key: residence.shapes[key] for key in works} == works

    def test_nothing_of_a_recording_is_read_after_the_step(self, vit, device):
        """The next recording writes over it: memory is read by the numbers the host has."""
        stream = Stream(eventful.convert(vit.make().to(device), Config.fast(TopR(5))))
        for frame in moving_square(3, vit.size, noise=0.05):
            outputs(vit, stream, [frame], device)
            assert stream._state.slots is None
            assert stream._state.good is None

    def test_memory_goes_back_to_the_pool(self, vit, device):
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        frame = moving_square(1, vit.size)[0].to(device)
        stream = Stream(model)
        stream(frame)
        pool, slot = stream._state.pool, stream._state.rows[0]
        del stream
        gc.collect()
        other = Stream(model)
        other(frame)
        assert other._state.pool is pool
        assert other._state.rows == [slot]
        assert pool.capacity == 1

    def test_many_streams_in_a_row(self, vit, device):
        """Work tied to slots in a row, and work that is not, give the same."""
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        names = "abcde"
        clips = {n: moving_square(6, vit.size, noise=0.05, seed=i) for i, n in enumerate(names)}
        expected = {n: outputs(vit, Stream(model), clip, device) for n, clip in clips.items()}
        batch = StreamBatch(model)
        for name in names:
            batch.join(name)
        for t, order in enumerate([names, names, "edcba", names, "badce", names]):
            frames = torch.cat([clips[n][t] for n in order]).to(device)
            with torch.no_grad():
                got = vit.output(batch(frames, streams=tuple(order)))
            near(list(got.split(1)), [expected[n][t] for n in order], device)

    def test_some_streams_of_a_batch(self, vit, device):
        """Stepping some streams leaves the others' memory alone."""
        model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
        clips = {n: moving_square(6, vit.size, noise=0.05, seed=i) for i, n in enumerate("ab")}
        expected = {n: outputs(vit, Stream(model), clip, device) for n, clip in clips.items()}
        batch = StreamBatch(model)
        batch.join("a")
        batch.join("b")
        seen = {"a": 0, "b": 0}
        for names in ("ab", "a", "a", "ba", "b", "b", "ab"):
            frames = torch.cat([clips[n][seen[n]] for n in names]).to(device)
            with torch.no_grad():
                got = vit.output(batch(frames, streams=tuple(names)))
            near(list(got.split(1)), [expected[n][seen[n]] for n in names], device)
            for n in names:
                seen[n] += 1


def test_a_threshold_has_room_for_what_passed_at_the_last_frame(device):
    """Far more tokens than the first guess, and than fit a sample: one frame later all of them."""
    model = eventful.convert(
        large_vit().to(device),
        Config.fast(Threshold(2.0), scene_cut=None, max_age=None, fallback=False),
    )
    stream = Stream(model)
    updated = []
    for frame in clip_of([0.0, 0.0, 0.0, 0.9, 0.9, 0.9, 0.0]):
        stream(frame.to(device))
        updated.append((stream.last.wanted, *stream.last.updated.values()))
    assert updated[2][1] < 64
    assert updated[3][0] > 500 > updated[3][1]  # as many as had room
    assert updated[4][0] == updated[4][1] > 500
    assert updated[5][0] == updated[5][1] > 500


def test_snapshot_and_policy_of_ones_own(vit, device, tmp_path):
    """The state moves out for a policy that asks the host, and in again, unchanged."""

    @dataclasses.dataclass(frozen=True)
    class Mine:
        order = 2.0

        def select(self, error, context):
            return TopR(5).select(error, context)

    model = eventful.convert(vit.make().to(device), Config.fast(TopR(5)))
    clip = moving_square(9, vit.size, noise=0.05)
    expected = outputs(vit, Stream(model), clip, device)
    stream = Stream(model)
    got = outputs(vit, stream, clip[:3], device)
    stream.policy = Mine()
    got += outputs(vit, stream, clip[3:5], device)
    assert not isinstance(stream._state, SlotState)
    stream.policy = TopR(5)
    got += outputs(vit, stream, clip[5:6], device)
    assert isinstance(stream._state, SlotState)
    stream = Stream.load(model, stream.snapshot())
    got += outputs(vit, stream, clip[6:], device)
    near(got, expected, device)


def test_nothing_asks_the_host(vit, device):
    """Neither a flush nor a steady step synchronises."""
    if device != "cuda":
        pytest.skip("a CPU has nothing to wait for")
    model = eventful.convert(vit.make().to(device), Config.fast())
    clip = [frame.to(device) for frame in moving_square(8, vit.size, noise=0.05)]
    stream = Stream(model)
    for frame in clip[:4]:
        stream(frame)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for frame in clip[4:]:
            stream(frame)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    works = stream._executor.store.shapes.values()
    assert any(work.recorded is not None for work in works)
    assert all(w.recorded is None or w.recorded.blocks is None for w in works)


def test_buckets():
    assert [bucket(n, 4097) for n in (1, 64, 65, 512, 513, 1000, 1025, 4000, 4097)] == [
        64, 64, 128, 512, 640, 1024, 1280, 4096, 4097,
    ]  # fmt: skip
    assert len({bucket(n, 4097) for n in range(1, 2049)}) == 16
    assert [bucket(n, 4097, steady=True) for n in (1, 512, 583, 4097)] == [16, 512, 592, 4097]
    assert [bucket(n, 50) for n in (1, 9, 49, 60)] == [8, 16, 50, 50]
