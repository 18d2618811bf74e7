"""One pool of tokens for several streams: who gets how many, and that nobody is harmed."""

from __future__ import annotations

import math

import pytest
import torch

import eventful
import zoo_timm
from eventful import Config, FollowScene, Shared, Stream, StreamBatch, TopFraction, TopR, ops
from eventful.engine.plan import ResidentPlan
from eventful.engine.widths import Counts, demand_of, width_of
from eventful.errors import ConfigError, NonFiniteError
from eventful.policies import policy_from_dict, policy_to_dict
from tolerances import assert_near

ENTRY = zoo_timm.ZOO["vit"]
TOKENS = 21
BARE = {"scene_cut": None, "fallback": False}
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    params=["host", "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])],
)
def device(request, monkeypatch, full_precision):
    """Where steps run: on the host, or without it, on the CPU or a GPU."""
    resident = set() if request.param == "host" else {request.param}
    monkeypatch.setattr("eventful.engine.plan.DEVICES", resident)
    return "cpu" if request.param == "host" else request.param


@pytest.fixture
def model():
    torch.manual_seed(3)
    return ENTRY.make()


def share_out(error, share, floor=0, contrast=None, forced=None, shared=None):
    batch = len(error)
    ones = torch.ones(batch, dtype=torch.int64)
    pool = ops.Pool(ones if shared is None else torch.tensor(shared), ones * share, ones * floor)
    contrast = torch.ones(batch) if contrast is None else torch.tensor(contrast)
    return ops.share_out(error, contrast, pool, forced).tolist()


class TestShareOut:
    def test_all_tokens_of_the_pool_are_given_out(self):
        torch.manual_seed(0)
        for floor in (0, 1, 3, 5):
            caps = share_out(torch.rand(6, 40), 5, floor)
            assert sum(caps) == 30
            assert min(caps) >= floor

    def test_the_largest_errors_get_them(self):
        error = torch.tensor([[9.0, 1, 8, 7], [2.0, 6, 3, 0]])
        assert share_out(error, 2) == [3, 1]
        assert share_out(error, 1) == [2, 0]
        assert share_out(error, 2, floor=2) == [2, 2]

    def test_errors_are_relative_to_the_contrast_of_their_stream(self):
        error = torch.tensor([[9.0, 1, 8, 7], [2.0, 6, 3, 0]])
        assert share_out(error, 2, contrast=[10.0, 1.0]) == [1, 3]

    def test_no_stream_gets_more_than_it_has(self):
        error = torch.stack([torch.full((4,), 9.0), torch.zeros(4), torch.zeros(4)])
        assert share_out(error, 3) == [4, 3, 2]  # equal errors are spread evenly

    def test_forced_tokens_are_not_taken_from_the_pool(self):
        error = torch.tensor([[9.0, 1, 8, 7], [2.0, 6, 3, 0]])
        forced = torch.tensor([[True, False, True, True], [False] * 4])
        assert share_out(error, 2, forced=forced) == [1, 3]
        assert share_out(error, 1, forced=forced) == [0, 2]
        assert share_out(error, 1, floor=1, forced=forced) == [1, 1]

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_bad_stream_puts_in_nothing(self, bad):
        error = torch.tensor([[9.0, 1, 8, 7], [2.0, bad, 3, 0], [3.0, 4, 5, 6]])
        caps = share_out(error, 2)
        assert [caps[0], caps[2]] == share_out(error[[0, 2]], 2)

    @pytest.mark.parametrize("contrast", [0.0, 1e-6, math.nan, math.inf])
    def test_a_stream_without_contrast_keeps_to_its_own(self, contrast):
        error = torch.tensor([[9.0, 1, 8, 7], [2.0, 6, 3, 0], [3.0, 4, 5, 6]])
        caps = share_out(error, 2, contrast=[1.0, contrast, 1.0])
        assert caps[1] == 2
        assert [caps[0], caps[2]] == share_out(error[[0, 2]], 2)

    def test_other_streams_keep_their_caps(self):
        error = torch.tensor([[9.0, 1, 8, 7], [2.0, 6, 3, 0], [3.0, 4, 5, 6]])
        caps = share_out(error, 2, shared=[1, 0, 1])
        assert caps[1] == 2
        assert [caps[0], caps[2]] == share_out(error[[0, 2]], 2)

    def test_the_order_of_streams_does_not_matter(self):
        torch.manual_seed(1)
        error, contrast = torch.rand(5, 30), (torch.rand(5) + 0.1).tolist()
        caps = share_out(error, 4, 2, contrast)
        turned = share_out(error.flip(0), 4, 2, contrast[::-1])
        assert turned == caps[::-1]


def frames_of(busy: int, streams: int = 4, frames: int = 6) -> list[torch.Tensor]:
    """A batch per frame: one stream that changes all over, the others nearly still."""
    draw = torch.Generator().manual_seed(0)
    shape = (streams, 3, *ENTRY.size)
    ground = torch.randn(shape, generator=draw)
    noise = torch.full((streams, 1, 1, 1), 0.001)
    noise[busy] = 0.5
    return [ground + noise * torch.randn(shape, generator=draw) for _ in range(frames)]


def run(model, policies, frames, device="cpu", **options):
    """Outputs and counts of tokens of each frame but the first."""
    config = Config.fast(TopR(1), **{**BARE, **options})
    batch = StreamBatch(eventful.convert(model.to(device), config), maps=True, check="sync")
    for number, policy in enumerate(policies):
        batch.join(str(number), policy)
    outputs, counts, masks = [], [], []
    for frame in frames:
        outputs.append(batch(frame.to(device)).clone())
        (gate,) = batch.last.gates.values()
        counts.append(gate.counts.tolist())
        masks.append(gate.mask.cpu())
    return outputs[1:], counts[1:], masks[1:]


@pytest.fixture
def roomy(monkeypatch):
    """Selections on a device have room for all that pass, so that nothing waits."""
    monkeypatch.setattr("eventful.engine.widths._FIRST_SHARE", 1.0)
    monkeypatch.setattr("eventful.engine.widths._MARGIN", 100.0)


@pytest.mark.parametrize("options", [{}, {"context": None, "motion": False}], ids=["fast", "bare"])
def test_one_stream_selects_as_a_fraction(model, device, options, roomy):
    frames = frames_of(0, streams=1)
    shared = run(model, [Shared(0.2)], frames, device, **options)
    fraction = run(model, [TopFraction(0.2)], frames, device, **options)
    assert all(torch.equal(a, b) for a, b in zip(shared[2], fraction[2], strict=True))
    for a, b in zip(shared[0], fraction[0], strict=True):
        assert_near(a, b, "step")


@pytest.mark.parametrize("rule", [Config.exact, Config.paper])
def test_one_stream_selects_as_a_fraction_at_every_gate(model, rule):
    frames = frames_of(0, streams=1)
    records = []
    for policy in (Shared(0.2), TopFraction(0.2)):
        stream = Stream(eventful.convert(model, rule(policy)))
        for frame in frames:
            stream(frame)
        records.append(stream.last.updated)
    assert records[0] == records[1]


def test_all_of_the_pool_is_dense(model, device, roomy):
    frames = frames_of(1)
    outputs, _, _ = run(model, [Shared(1.0)] * 4, frames, device)
    with torch.no_grad():
        for got, frame in zip(outputs, frames[1:], strict=True):
            assert_near(got, model(frame.to(device)), "step")


def test_still_streams_give_their_tokens_to_the_busy_one(model, device, roomy):
    plain = {"protect": False, "max_age": None, "context": None, "motion": False}
    _, counts, _ = run(model, [Shared(0.25, floor=0.1)] * 4, frames_of(2), device, **plain)
    share, floor = int(0.25 * TOKENS), math.ceil(0.1 * TOKENS)
    assert counts == [[floor, floor, 4 * share - 3 * floor, floor]] * len(counts)


def test_forced_tokens_come_on_top(model, device, roomy):
    plain = {"max_age": None, "context": None, "motion": False}
    _, counts, masks = run(model, [Shared(0.25)] * 4, frames_of(2), device, **plain)
    assert all(sum(row) == 4 * int(0.25 * TOKENS) + 4 for row in counts)
    assert all(bool(mask[:, 0].all()) for mask in masks)


def test_streams_in_another_order_select_the_same(model, device, roomy):
    frames = frames_of(1)
    policies = [Shared(0.2), Shared(0.3, floor=0.1), TopR(3), Shared(0.1)]
    _, _, masks = run(model, policies, frames, device)
    turned = run(model, policies[::-1], [frame.flip(0) for frame in frames], device)[2]
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(masks, turned, strict=True))


def test_other_policies_in_the_same_step_are_untouched(model, device, roomy):
    frames = frames_of(0)
    others = [TopR(3), FollowScene(level=0.1)]
    _, _, masks = run(model, [Shared(0.2), *others, Shared(0.2)], frames, device)
    alone = run(model, others, [frame[1:3] for frame in frames], device)[2]
    assert all(torch.equal(a[1:3], b) for a, b in zip(masks, alone, strict=True))


def test_a_stream_of_one_colour_does_no_harm(model, device, roomy):
    frames = frames_of(1)
    for time, frame in enumerate(frames):
        frame[3] = 0.1 * time  # flickers
    _, _, masks = run(model, [Shared(0.2)] * 4, frames, device, context=None)
    alone = run(model, [Shared(0.2)] * 3, [frame[:3] for frame in frames], device, context=None)[2]
    assert all(torch.equal(a[:3], b) for a, b in zip(masks, alone, strict=True))


def test_a_bad_frame_does_no_harm(model, device, roomy):
    """The others share what they put in themselves, as if the stream were not in the step."""
    frames = frames_of(1)
    config = Config.fast(Shared(0.2), **BARE)
    converted = eventful.convert(model.to(device), config)
    names = [str(number) for number in range(4)]
    batch, fewer = (StreamBatch(converted, maps=True, check="sync") for _ in range(2))
    for name in names:
        batch.join(name)
        fewer.join(name)
    for frame in frames[:3]:
        batch(frame.to(device))
        fewer(frame.to(device))
    bad = frames[3].clone()
    bad[2, :, 3, 3] = math.nan
    with pytest.raises(NonFiniteError):
        batch(bad.to(device))
    good = [0, 1, 3]
    fewer(frames[3][good].to(device), streams=[names[row] for row in good])
    got = batch(frames[4].to(device))
    expected = fewer(frames[4].to(device))
    assert_near(got[good], expected[good], "step")


def test_host_and_device_select_the_same(model, monkeypatch, roomy):
    frames = frames_of(1)
    policies = [Shared(0.2), Shared(0.3), TopR(3), Shared(0.1, floor=0.05)]
    host = run(model, policies, frames)
    monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    device = run(model, policies, frames)
    assert host[1] == device[1]
    assert all(torch.equal(a, b) for a, b in zip(host[2], device[2], strict=True))
    for a, b in zip(host[0], device[0], strict=True):
        assert_near(a, b, "step")


def test_what_does_not_fit_on_a_device_fits_at_the_next_frame(model, monkeypatch):
    monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    monkeypatch.setattr("eventful.engine.widths._FIRST_SHARE", 0.0)
    monkeypatch.setattr("eventful.engine.widths.bucket", lambda count, tokens, steady=False: count)
    bare = {"context": None, "motion": False, "protect": False, "max_age": None}
    _, counts, _ = run(model, [Shared(0.25)] * 4, frames_of(2), **bare)
    assert counts[0][2] == int(0.25 * TOKENS)  # its own share
    assert counts[1][2] > 2 * counts[0][2]


def resident(*policies):
    params = [policy.params(1000) for policy in policies]
    return ResidentPlan(params, 1000, 3, (False, False, True))


def test_a_budget_is_the_share_not_what_the_busiest_got():
    plan = resident(Shared(0.1), Shared(0.1))
    known = [Counts(190, 190), Counts(16, 16)]
    demand = demand_of(plan, known)
    assert (demand.wanted, demand.updated) == (103, 103)
    assert demand_of(plan, [None, None]) == demand


def test_widths_follow_the_counts():
    plan = resident(Shared(0.1), Shared(0.1))
    assert width_of(plan, [Counts(150, 150), Counts(16, 16)], steady=False) == 192
    assert width_of(plan, [Counts(30, 30), Counts(16, 16)], steady=False) == 64
    assert width_of(plan, [Counts(190, 190), Counts(16, 16)], steady=False) == 192
    # 100 + 100 tokens, 20 of them for the other, and 3 on top.
    assert width_of(plan, [None, None], steady=True) >= 183


@pytest.mark.parametrize("path", ["host", "cpu"])
def test_the_fallback_asks_for_the_budget(model, path, monkeypatch):
    """The busiest stream alone does not make the step run dense."""
    monkeypatch.setattr("eventful.engine.plan.DEVICES", {path})
    asked = []

    def decide(self, demand):
        asked.append(demand)
        return False

    monkeypatch.setattr("eventful.cost.fallback.Fallback.decide", decide)
    bare = {"fallback": True, "protect": False, "max_age": None}
    run(model, [Shared(0.25)] * 4, frames_of(2), **bare)
    assert asked
    assert {(demand.wanted, demand.updated) for demand in asked} == {(5, 5)}


def test_a_snapshot_goes_on(model, device, roomy):
    frames = frames_of(1)
    converted = eventful.convert(model.to(device), Config.fast(Shared(0.2, floor=0.1), **BARE))
    batch = StreamBatch(converted, check="sync")
    for name in "abcd":
        batch.join(name)
    for frame in frames[:3]:
        batch(frame.to(device))
    again = StreamBatch(converted, check="sync")
    for name in batch.streams:
        again.join(name, snapshot=batch.snapshot(name))
    assert again._policies["a"] == Shared(0.2, floor=0.1)
    for frame in frames[3:]:
        assert_near(batch(frame.to(device)), again(frame.to(device)), "step")


def test_plain_data():
    policy = Shared(0.1, floor=0.05)
    assert policy_from_dict(policy_to_dict(policy)) == policy
    config = Config.fast(policy)
    assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "bad",
    [{"fraction": 1.5}, {"fraction": "x"}, {"fraction": 0.1, "floor": -1}, {"fraction": True}],
)
def test_settings_are_checked(bad):
    with pytest.raises(ConfigError):
        Shared(**bad)


def test_select_shares_out_too():
    """`select`, which is called where another policy has no numbers, on a batch of its own."""
    error = torch.tensor([[9.0, 1, 8, 7], [2.0, 6, 3, 0]])
    context = eventful.GateContext("frame", "frame", 0, torch.ones(2), contrast=torch.ones(2))
    assert Shared(0.5, floor=0.0).select(error, context).counts.tolist() == [3, 1]
