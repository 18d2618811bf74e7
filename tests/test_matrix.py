"""Laws on plain and resident steps, with and without dense steps in between, on 21 to 601 tokens.

The default run has every pair of values of the axes in `matrix.py`; `-m slow` has the rest of the
product. With 600 tokens and more, levels are measured on a sample, selections have several
numbers of slots, and errors are computed in several chunks.
"""

from __future__ import annotations

import itertools
import weakref

import torch

import eventful
from clips import moving_square
from eventful import Always, Config, Stream, StreamBatch, Threshold, TopR
from matrix import (
    SUBJECTS,
    cells,
    decisions,
    pairwise,
    possible,
    roomy,
    without_fallback,
    world,
)
from simulated import clip_of
from tolerances import apart, assert_near, limit

__all__ = ["decisions", "roomy", "world"]

SELECTIVE = ("noise", "threshold", "top")


def run(stream, clip):
    """The outputs, and at which frames the stream ran dense because it is cheaper."""
    outputs, ran = [], []
    for frame in clip:
        outputs.append(stream(frame))
        ran.append(stream.last.fallback)
    return outputs, ran


def near(got, expected, kind="step"):
    for t, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_near(a, b, kind, f"frame {t}")


@cells(policy=["all"], spelled=["top", "always"])
def test_all_tokens_is_dense(world):
    """Under a busy machine dense steps come in between: the same again."""
    stream, clip = world.stream(), world.clip(8)
    stream.policy = {"top": TopR(10**6), "always": Always()}[world.further["spelled"]]
    got, ran = run(stream, clip)
    world.check_path(stream)
    assert any(ran) == world.busy
    near(got, map(world.dense, clip), "model")


@cells()
def test_a_still_video_changes_nothing(world):
    """... and costs the special tokens and those due for a refresh, where the scene decides."""
    config = world.config()
    stream, frame = Stream(world.convert(config)), world.clip(1)[0]
    first, turn = stream(frame), 0
    for t in range(1, 7):
        assert_near(stream(frame), first, "step", f"frame {t}")
        turn = 0 if all(stream.last.flushed) else turn + 1
        if turn and world.chosen in ("noise", "threshold"):
            updated = next(iter(stream.last.updated.values()))
            assert updated == stream.last.wanted == world.forced(config, turn), f"frame {t}"
    world.check_path(stream)


@cells()
def test_interleaved_streams_equal_separate_ones(world, decisions):
    """Streams share what steps cost: separate ones run dense where the interleaved ones did."""
    model = world.convert()
    clips = [world.clip(8, seed) for seed in (1, 2)]
    streams = [Stream(model), Stream(model)]
    got, ran = ([], []), ([], [])
    for frames in zip(*clips, strict=True):
        for i, frame in enumerate(frames):
            got[i].append(streams[i](frame))
            ran[i].append(streams[i].last.fallback)
    assert any(ran[0] + ran[1]) == world.busy
    for i in (0, 1):
        world.check_path(streams[i])
        near(decisions.replay(Stream(model), clips[i], ran[i]), got[i])


# Streams by frame: some join, leave, skip frames and change places.
PLAN = [*["abc"] * 6, "cb", "ba", "bad", "bad"]


@cells()
def test_a_batch_equals_single_streams(world, decisions, roomy):
    """A batch runs dense as a whole: single streams run dense where the batch did.

    Slots are enough for all tokens, because those of a batch are as many as its busiest stream
    needs: alone, a stream may have fewer, and some tokens wait.
    """
    model = world.convert()
    clips = {name: world.clip(len(PLAN), seed) for seed, name in enumerate("abcd")}
    batch, seen = StreamBatch(model), {name: ([], [], []) for name in "abcd"}
    for t, names in enumerate(PLAN):
        for name in set(batch.streams) - set("".join(PLAN[t:])):
            batch.leave(name)
        for name in names:
            if name not in batch.streams:
                batch.join(name)
        frames = [clips[name][t] for name in names]
        got = batch(torch.cat(frames), streams=tuple(names))
        for name, frame, row in zip(names, frames, got.split(1), strict=True):
            for kept, value in zip(seen[name], (frame, batch.last.fallback, row), strict=True):
                kept.append(value)
    world.check_path(batch)
    assert any(any(ran) for _, ran, _ in seen.values()) == world.busy
    for frames, ran, rows in seen.values():
        near(rows, decisions.replay(Stream(model), frames, ran), "model")


@cells(at=[2, 7])
def test_a_snapshot_goes_on_as_if_never_stopped(world, decisions, roomy):
    """Taken after eventful steps, or in the middle of dense ones.

    A stream that goes on counts anew how many tokens pass, so slots are enough for all.
    """
    model, at = world.convert(), world.further["at"]
    stream, clip = Stream(model), world.clip(at + 4)
    before, early = run(stream, clip[:at])
    resumed = Stream.load(model, stream.snapshot())
    after, rest = run(resumed, clip[at:])
    world.check_path(resumed)
    if world.busy:
        assert any(early) == (at > 2)
    near(decisions.replay(Stream(model), clip, early + rest), before + after)


@cells(rule=["fast", "block"], policy=["top", "threshold"])
def test_after_motion_stops_max_age_reaches_dense(world):
    max_age, depth = 5, world.subject.depth
    stream = world.stream(max_age=max_age)
    clip = world.clip(3)
    for frame in clip:
        got = stream(frame)
    expected = world.dense(clip[-1])
    if not all(stream.last.flushed):
        assert apart(got, expected) > 100 * limit("model")  # there is something to catch up with
    for _ in range(depth * max_age):
        got = stream(clip[-1])
    assert_near(got, expected)


@cells(fallback=["busy"], policy=["threshold", "top"], seed=range(4))
def test_whatever_the_clock_does_the_stream_is_valid(world, roomy):
    """Dense steps are the dense model, and what follows them a stream that begins there.

    Under `NoiseThreshold` it is not: the level learned before a dense step stays.
    """
    config = world.config(scene_cut=None)
    stream, other = Stream(world.convert(config)), world.convert(without_fallback(config))
    ran = []
    for t, frame in enumerate(world.clip(16)):
        got = stream(frame)
        ran.append(stream.last.fallback)
        if all(stream.last.flushed):
            twin = Stream(other)  # begins with this frame
            assert_near(got, world.dense(frame), "model", f"frame {t}")
        assert_near(got, twin(frame), "step", f"frame {t}")
        assert not twin.last.fallback
    world.check_path(stream)
    assert any(ran), "nothing ran dense"
    assert not all(ran[ran.index(True) :]), "nothing came back"


@cells()
def test_counts(world):
    """Never more than the cap and the forced tokens; never more than wanted; dense costs dense."""
    config = world.config(scene_cut=None)
    stream, turn, held_back = Stream(world.convert(config)), 0, False
    clip = clip_of([0.1] * 5 + [0.8, 0.6, 0.8, 0.2, 0.1, 0.1], world.subject.size)
    for t, frame in enumerate(clip):
        stream(frame)
        last = stream.last
        first = next(iter(last.updated.values()))
        turn = 0 if all(last.flushed) else turn + 1
        assert last.flushed == [turn == 0]
        if not turn:
            assert set(last.updated.values()) == {world.subject.tokens}
            assert last.macs == last.dense_macs
            assert (last.wanted is None) == (t == 0)
            continue
        forced = world.forced(config, turn)
        most = min(world.subject.tokens, world.cap() + forced)
        assert last.wanted >= first
        assert forced <= first
        assert max(last.updated.values()) <= most
        held_back |= last.wanted > first
        if world.chosen in ("top", "all"):
            assert set(last.updated.values()) == {most}
            assert last.wanted == most
        elif world.path == "plain":
            assert first == min(last.wanted, most)
    world.check_path(stream)
    if world.chosen == "noise" and world.fallback != "busy":
        assert held_back


@cells(fallback=["still"], at=[2, 5])
def test_a_dense_step_counts_the_same_tokens_as_an_eventful_one(world, decisions):
    at = world.further["at"]
    clip = clip_of([0.1] * 3 + [0.3, 0.5, 0.4], world.subject.size)[: at + 1]
    config = world.config(scene_cut=None)
    eventful_, forced = world.stream(scene_cut=None, fallback=False), Stream(world.convert(config))
    run(eventful_, clip)
    decisions.replay(forced, clip, [t == at for t in range(at + 1)])
    assert (eventful_.last.fallback, forced.last.fallback) == (False, True)
    assert forced.last.wanted == eventful_.last.wanted
    assert set(forced.last.updated.values()) == {world.subject.tokens}
    world.check_path(forced)


@cells(path=["resident"], fallback=["off"], rule=["fast", "block"], policy=["threshold"])
def test_the_next_frame_has_room_for_what_passed(world):
    """A busier scene may wait for one frame; from the next one on every token finds a slot."""
    stream = Stream(world.convert(world.config(scene_cut=None, max_age=None, protect=False)))
    counts = []
    for frame in clip_of([0.2] * 3 + [0.8] * 4, world.subject.size, noise=0.0):
        stream(frame)
        counts.append((next(iter(stream.last.updated.values())), stream.last.wanted))
    assert all(updated == wanted for updated, wanted in counts[-2:])
    assert counts[-1][1] > 0.5 * world.subject.tokens
    world.check_path(stream)


def test_each_block_counts_the_windows_of_its_own_selection():
    subject, level = SUBJECTS["sam"], Threshold({"blocks.2.block": 12.0, "default": 0.5})
    model = eventful.convert(subject.make(), Config(level, gating="block"))
    stream, differ = Stream(model, maps=True), False
    rows, columns = subject.size[0] // 8, subject.size[1] // 8
    for frame in moving_square(6, subject.size, noise=0.05):
        stream(frame)
        counts = []
        for name in ("blocks.0", "blocks.2"):  # windows of 3 x 3
            mask = stream.last.gates[f"{name}.block"].mask.view(rows, columns)
            touched = {(y // 3, x // 3) for y, x in mask.nonzero().tolist()}
            assert stream.last.blocks[name].work["windows"].tolist() == [len(touched)]
            counts.append(len(touched))
        differ |= counts[0] != counts[1]
    assert differ


class ReusedIds:
    """Identities as `id` gives them, each given again as soon as its object is gone."""

    def __init__(self):
        self._given = {}

    def __call__(self, thing):
        for number, held in self._given.items():
            if held() is thing:
                return number
        free = (n for n in itertools.count() if n not in self._given or self._given[n]() is None)
        number = next(free)
        self._given[number] = weakref.ref(thing)
        return number


def test_each_block_attends_by_its_own_selection(monkeypatch):
    """What blocks share in a step is kept by the identity of a selection, which may come again.

    Resident selections hold all tokens here, by falling error: in another order at every block.
    """
    monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    for module in ("rules.windows", "rules.block"):
        monkeypatch.setattr(f"eventful.{module}.id", ReusedIds(), raising=False)
    subject = SUBJECTS["sam"]
    model = subject.make()
    stream = Stream(eventful.convert(model, Config(TopR(10**6), gating="block")))
    for t, frame in enumerate(moving_square(4, subject.size, noise=0.05)):
        with torch.no_grad():
            assert_near(stream(frame), model(frame), note=f"frame {t}")


def test_a_batch_says_that_some_of_its_streams_ran_dense(decisions):
    """One stream joins, and flushes in a pass of its own; the others run dense to save time."""
    subject = SUBJECTS["vit"]
    batch = StreamBatch(eventful.convert(subject.make(), Config.fast(Threshold(1.0))))
    plan = ["ab", "ab", "abc"]
    for name in "abc":
        batch.join(name)
    frame = torch.randn(1, 3, *subject.size)

    def step(names):
        return batch(torch.cat([frame] * len(names)), streams=tuple(names))

    decisions.replay(step, plan, [False, False, True])
    assert batch.last.flushed == [True] * 3
    assert batch.last.fallback


def test_the_slices_hold_every_pair():
    rows = [{"a": a, "b": b, "c": c} for a in range(3) for b in range(4) for c in range(2)]
    few = pairwise(rows)
    assert len(few) < len(rows)
    for one, two in (("a", "b"), ("a", "c"), ("b", "c")):
        assert {(r[one], r[two]) for r in few} == {(r[one], r[two]) for r in rows}
    cell = {"path": "resident", "rule": "exact", "model": "sam"}
    assert not possible(cell)
    assert possible(cell | {"path": "plain"})
