"""Rules without GPU kernels: on a device every frame runs dense, and the stream says so."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import dataclasses
import time
import warnings

import pytest
import torch

import eventful
from clips import moving_square
from eventful import Config, OperationsBudget, Stream, StreamBatch, Threshold, TopR
from eventful.memory.slots import SlotState
from resident import FAMILIES, device, near, on_cuda, outputs, vit  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:.*each frame runs dense")
SLOW = {
    "exact": Config.exact(TopR(5)),
    "thresholds per gate": Config.exact(Threshold({"qkv": 0.5, "default": 1.0})),
    "operator query": Config.fast(TopR(5), gating="operator"),
    "deterministic": Config.exact(TopR(5), deterministic=True),
    "pooled": Config.exact(TopR(5), pool=2),
}


@pytest.fixture
def sam():
    torch.manual_seed(7)
    return FAMILIES["sam"]


@pytest.fixture
def clip(sam):
    return moving_square(4, sam.size, noise=0.05)


@pytest.mark.parametrize("config", SLOW.values(), ids=SLOW)
def test_each_frame_runs_dense_and_says_so(sam, clip, device, config):
    model = sam.make().to(device)
    stream = Stream(eventful.convert(model, config))
    expected = outputs(sam, model, clip, device)
    for t, frame in enumerate(clip):
        (got,) = outputs(sam, stream, [frame], device)
        if config.pool == 1:
            near([got], expected[t : t + 1], device)
        record = stream.last
        assert record.fallback
        assert "each frame runs dense" in record.reason
        assert "Config.fast()" in record.reason
        assert record.fraction == 1.0
        assert record.macs == record.dense_macs > 0
    summary = stream.summary()
    assert summary.fallbacks == summary.flushed == len(clip)
    assert summary.operations_saved == 0.0
    assert summary.reason == record.reason
    assert summary.reason in str(summary)
    assert "cheaper" not in str(summary)


def test_dense_steps_are_resident(sam, clip, device):
    """Not the rule's steps on the host: steps that are recorded, where anything is."""
    stream = Stream(eventful.convert(sam.make().to(device), Config.exact(TopR(5))))
    outputs(sam, stream, clip, device)
    assert isinstance(stream._state, SlotState)
    if device == "cuda":
        works = stream._executor.store.shapes.values()
        assert any(work.recorded is not None for work in works)


@on_cuda
@pytest.mark.gpu
@pytest.mark.real_clock
def test_a_step_takes_no_longer_than_the_dense_model(sam, clip):
    model = sam.make().cuda()
    stream = Stream(eventful.convert(model, Config.exact(TopR(5))))
    frames = [frame.cuda() for frame in clip] * 5

    def fastest(run):
        took = []
        for frame in frames:
            torch.cuda.synchronize()
            began = time.perf_counter()
            with torch.no_grad():
                sam.call(run, frame)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
        return min(took)

    fastest(stream)  # steps are recorded at their second or third use
    assert fastest(stream) < 1.2 * fastest(model)


KEPT = {
    "no fallback": Config.exact(TopR(5), fallback=False),
    "paper": Config.paper(TopR(5)),
    "tokenwise": Config.tokenwise(TopR(5)),
    "stgt": Config.stgt(TopR(5)),
    "fast": Config.fast(TopR(5)),
    "block": Config.fast(TopR(5), gating="block"),
}


@pytest.mark.parametrize("config", KEPT.values(), ids=KEPT)
def test_others_stay_eventful(sam, clip, device, config):
    stream = Stream(eventful.convert(sam.make().to(device), config))
    outputs(sam, stream, clip, device)
    assert stream.last.reason is None
    assert stream.last.fraction < 1
    assert stream.summary().reason is None


def test_global_attention_stays_eventful(vit, device):
    stream = Stream(eventful.convert(vit.make().to(device), Config.exact(TopR(5))))
    outputs(vit, stream, moving_square(3, vit.size, noise=0.05), device)
    assert stream.last.reason is None
    assert stream.last.fraction < 1


def test_on_the_host_the_rule_runs(sam, clip, monkeypatch):
    monkeypatch.setattr("eventful.engine.plan.DEVICES", set())
    stream = Stream(eventful.convert(sam.make(), Config.exact(TopR(5))))
    outputs(sam, stream, clip, "cpu")
    assert stream.last.reason is None
    assert stream.last.fraction < 1


def test_the_variable_switches_it_off(sam, clip, device, monkeypatch):
    monkeypatch.setenv("EVENTFUL_FALLBACK", "0")
    stream = Stream(eventful.convert(sam.make().to(device), Config.exact(TopR(5))))
    outputs(sam, stream, clip, device)
    assert stream.last.reason is None


@pytest.mark.filterwarnings("always")
def test_it_warns_once_a_model(sam, clip, device):
    model = eventful.convert(sam.make().to(device), Config.exact(TopR(5)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            outputs(sam, Stream(model), clip[:2], device)
    assert sum("each frame runs dense" in str(made.message) for made in caught) == 1


def test_gaps_between_converted_blocks(sam, clip, device):
    model = sam.make().to(device)
    names = [block.name for block in eventful.inspect(model).blocks]
    left_out = names[len(names) // 2]
    made = eventful.convert(model, Config.exact(TopR(5)), where=lambda name, _: name != left_out)
    stream = Stream(made)
    near(outputs(sam, stream, clip, device), outputs(sam, model, clip, device), device)
    assert stream.last.reason is not None


def test_a_snapshot_goes_on_as_the_rule(sam, clip, device, monkeypatch):
    """Nothing of the dense steps' memory is taken for the rule's, and nothing the other way."""
    model = sam.make().to(device)
    made = eventful.convert(model, Config.exact(TopR(10**6)))
    stream = Stream(made)
    outputs(sam, stream, clip[:2], device)
    held, kept = stream.nbytes, stream.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr("eventful.engine.plan.DEVICES", set())
        again = Stream.load(made, kept)
        near(outputs(sam, again, clip[2:], device), outputs(sam, model, clip[2:], device), device)
        assert again.last.reason is None
        kept = again.snapshot()
    back = Stream.load(made, kept)
    near(outputs(sam, back, clip, device), outputs(sam, model, clip, device), device)
    assert back.last.reason is not None
    assert back.nbytes == held < again.nbytes  # the rule's memory is not kept
    batch = StreamBatch(made)
    batch.join("a")
    outputs(sam, batch, clip[:1], device)
    batch.join("b", snapshot=kept)
    assert batch.nbytes == 2 * held


def test_streams_of_a_batch(sam, clip, device):
    model = sam.make().to(device)
    made = eventful.convert(model, Config.exact(TopR(5)))
    alone = Stream(made)
    outputs(sam, alone, clip[:1], device)
    batch = StreamBatch(made)
    batch.join("a")
    outputs(sam, batch, clip[:1], device)
    batch.join("b", snapshot=alone.snapshot())
    both = torch.cat([clip[1], clip[2]])
    got = outputs(sam, batch, [both], device)
    near(got, outputs(sam, model, [both], device), device)
    assert batch.last.fraction == 1.0
    assert batch.last.fallback
    batch.leave("a")
    near(outputs(sam, batch, clip[3:], device), outputs(sam, model, clip[3:], device), device)


def test_a_budget_of_operations_keeps_the_rule(sam, clip, device):
    """It promises a number of operations, which dense steps would not hold."""
    made = eventful.convert(sam.make().to(device), Config.exact(TopR(5)))
    stream = Stream(made)
    outputs(sam, stream, clip[:2], device)
    assert stream.last.reason is not None
    stream.budget = OperationsBudget(0.5)
    outputs(sam, stream, clip, device)
    assert stream.last.reason is None
    assert stream.last.fraction < 1
    stream.budget = None
    outputs(sam, stream, clip[:1], device)
    assert stream.last.reason is not None


def test_a_bad_frame_leaves_nothing(sam, clip, device):
    model = sam.make().to(device)
    stream = Stream(eventful.convert(model, Config.exact(TopR(5))), check="sync")
    outputs(sam, stream, clip[:1], device)
    with pytest.raises(eventful.errors.NonFiniteError):
        outputs(sam, stream, [clip[1] * torch.nan], device)
    near(outputs(sam, stream, clip[1:], device), outputs(sam, model, clip[1:], device), device)


def test_inspect_says_how_each_preset_runs(sam, vit):
    slow, plain = eventful.inspect(sam.make()), eventful.inspect(vit.make())
    assert slow.on_gpu == {
        "fast": "resident", "exact": "dense", "paper": "host", "tokenwise": "host", "stgt": "host",
    }  # fmt: skip
    assert plain.on_gpu == {**slow.on_gpu, "exact": "resident"}
    assert "exact has no GPU kernels for windows or relative position" in str(slow)
    assert "no GPU kernels" not in str(plain)


@dataclasses.dataclass(frozen=True)
class Mine:
    order = 2.0

    def select(self, error, context):
        return TopR(5).select(error, context)


def test_a_policy_of_ones_own_does_not_matter(sam, clip, device):
    model = sam.make().to(device)
    stream = Stream(eventful.convert(model, Config.exact(Mine())))
    near(outputs(sam, stream, clip, device), outputs(sam, model, clip, device), device)
    assert isinstance(stream._state, SlotState)
