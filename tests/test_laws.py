"""Laws that hold for every preset on every family of models, on tiny random weights, in fp32."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch

import eventful
import zoo_census
import zoo_timm
import zoo_towers
import zoo_transformers
from clips import moving_square, then_still
from definitions import DefinedModel
from eventful import Config, NoiseThreshold, Threshold, TopFraction, TopR
from tolerances import apart, assert_near, limit

ZOO = {
    **{f"timm/{name}": entry for name, entry in zoo_timm.ZOO.items()},
    **{f"hf/{name}": entry for name, entry in zoo_transformers.ZOO.items()},
    **{f"tower/{name}": entry for name, entry in zoo_towers.ZOO.items()},
}
PRESETS = ("fast", "exact", "paper", "tokenwise", "stgt")
RULES = {
    **{name: lambda policy, name=name, **o: Config.preset(name, policy, **o) for name in PRESETS},
    "block": lambda policy, **o: Config(policy, gating="block", max_age=64, **o),
    "operator-query": lambda policy, **o: Config(policy, gating="operator", **o),
    "delta-qk": lambda policy, **o: Config.paper(policy, attention="delta-qk", **o),
    "delta-av": lambda policy, **o: Config.paper(policy, attention="delta-av", **o),
    "delta-once": lambda policy, **o: Config.paper(policy, overlap="once", **o),
    "delta-touched": lambda policy, **o: Config.paper(policy, windows="touched", **o),
    "before-norm": lambda policy, **o: Config.paper(policy, gate="before-norm", **o),
    "frame-after-norm": lambda policy, **o: Config.fast(policy, gate="after-norm", **o),
}
FLOW = ("timm/vit", "timm/sam", "hf/yolos")  # families for laws of streams rather than of models


MORE = {f"hf/{name}": entry for name, entry in zoo_census.ZOO.items()}
QUICK = {f"hf/{name}" for name in zoo_census.QUICK}


def families():
    """Every family; those that have nothing of their own but a name are slow."""
    more = [
        pytest.param(entry, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, entry in MORE.items()
    ]
    return [pytest.param(entry, id=name) for name, entry in sorted(ZOO.items())] + more


@pytest.fixture(params=families())
def entry(request):
    return request.param


@pytest.fixture(params=FLOW)
def flow(request):
    return ZOO[request.param]


@pytest.fixture(params=sorted(RULES))
def rule(request):
    return RULES[request.param]


@pytest.fixture(params=PRESETS)
def preset(request):
    return RULES[request.param]


def make(entry):
    torch.manual_seed(7)
    return entry.make()


# Conversion leaves a model as it is, so that tests which do not change its weights share one.
made = functools.cache(make)


def in_turn(policies):
    """Every rule on every family, the policies in turn; the rest of the product is slow.

    The default run has every pair of a rule, a family and a policy.
    """
    cases = []
    for i, rule in enumerate(sorted(RULES)):
        for j, family in enumerate(FLOW):
            for k, (name, policy) in enumerate(policies.items()):
                marks = [pytest.mark.slow] if (i + j + k) % 2 else []
                case = f"{rule}-{family}-{name}"
                cases.append(pytest.param(ZOO[family], RULES[rule](policy), id=case, marks=marks))
    return pytest.mark.parametrize(("family", "config"), cases)


def run(entry, target, frame):
    with torch.no_grad():
        return entry.output(entry.call(target, frame))


def tokens(model, entry):
    return max(eventful.inspect(model, entry.size).tokens.values())


def check_dense(entry, config, frames, batch=1):
    model = made(entry)
    stream = eventful.Stream(eventful.convert(model, config))
    clip = moving_square(frames, entry.size, batch=batch, noise=0.05)
    dense = run(entry, model, torch.cat(clip)).split(batch)
    for t, (frame, expected) in enumerate(zip(clip, dense, strict=True)):
        assert_near(run(entry, stream, frame), expected, note=f"frame {t}")


def test_all_tokens_is_dense_on_every_family(entry, preset):
    check_dense(entry, preset(TopR(10**6)), frames=8, batch=2)


@pytest.mark.slow
def test_all_tokens_stays_dense_on_every_family(entry, preset):
    check_dense(entry, preset(TopR(10**6)), frames=100)


def test_all_tokens_is_dense_under_every_rule(flow, rule):
    check_dense(flow, rule(TopR(10**6)), frames=30)


@pytest.mark.slow
def test_all_tokens_stays_dense_under_every_rule(flow, rule):
    check_dense(flow, rule(TopR(10**6)), frames=100)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["timm/vit", "timm/sam", "hf/vitdet"])
def test_all_tokens_with_pooling_is_the_pooled_model(name, rule):
    """Pooling changes the model, so dense means: recomputed whole at every frame."""
    entry = ZOO[name]
    model = eventful.convert(made(entry), rule(TopR(10**6), pool=2))
    stream = eventful.Stream(model)
    clip = moving_square(30, entry.size, noise=0.05)
    expected = run(entry, eventful.Stream(model), torch.cat(clip))  # a first frame is a flush
    for t, frame in enumerate(clip):
        assert_near(run(entry, stream, frame), expected[t : t + 1], note=f"frame {t}")
    # Pooling does something.
    assert apart(expected, run(entry, made(entry), torch.cat(clip))) > 100 * limit("model")


def test_a_still_video_changes_nothing(entry, preset):
    stream = eventful.Stream(eventful.convert(made(entry), preset(TopFraction(0.3))))
    frame = moving_square(1, entry.size)[0]
    first = run(entry, stream, frame)
    for _ in range(5):
        assert_near(run(entry, stream, frame), first, entry.still)


def test_a_still_video_costs_nothing_by_default(flow):
    stream = eventful.Stream(eventful.convert(made(flow), Config.fast(max_age=None, protect=False)))
    frame = moving_square(1, flow.size)[0]
    first = run(flow, stream, frame)
    assert torch.equal(run(flow, stream, frame), first)
    assert stream.last.updated == {"frame": 0.0} or set(stream.last.updated.values()) == {0.0}


# Towers of Qwen put their tokens in an order of their own, which is known only inside a step.
DEFINED = [family for family in families() if not str(family.id).startswith("tower/qwen")]


@pytest.mark.parametrize("entry", DEFINED)
def test_some_tokens_follow_the_definition(entry):
    """At 30 % of the tokens; which ones is the stream's choice, what becomes of them is not."""
    config = Config.fast(TopFraction(0.3), motion=False, max_age=None, scene_cut=None)
    stream = eventful.Stream(eventful.convert(made(entry), config), maps=True)
    defined = DefinedModel(copy.deepcopy(made(entry)), stream)
    for t, frame in enumerate(moving_square(4, entry.size, noise=0.05)):
        got = run(entry, stream, frame)
        assert t == 0 or stream.last.fraction < 0.8
        assert_near(got, run(entry, defined.model, frame), note=f"frame {t}")


def test_outside_a_stream_it_is_the_original(entry, preset):
    model = made(entry)
    converted = eventful.convert(model, preset(TopR(3)))
    stream = eventful.Stream(converted)
    for frame in moving_square(2, entry.size, batch=2):
        expected = run(entry, model, frame)
        assert torch.equal(run(entry, converted, frame), expected)
        run(entry, stream, frame)
        assert torch.equal(run(entry, converted, frame), expected)


def test_state_dict_keys_and_weights_are_shared_both_ways(entry):
    model = make(entry)
    converted = eventful.convert(model)
    assert list(converted.state_dict()) == list(model.state_dict())
    frame = moving_square(1, entry.size)[0]
    other = copy.deepcopy(make(entry))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    converted.load_state_dict(other.state_dict())
    assert torch.equal(run(entry, model, frame), run(entry, other, frame))
    other.load_state_dict(converted.state_dict())
    model.load_state_dict(make(entry).state_dict())
    assert torch.equal(run(entry, converted, frame), run(entry, make(entry), frame))


@pytest.mark.in_turn(2)
def test_interleaved_streams_equal_separate_ones(entry, preset):
    config = preset(TopFraction(0.3))
    model = eventful.convert(made(entry), config)
    clips = [moving_square(3, entry.size, noise=0.05, seed=seed) for seed in (1, 2)]
    streams = [eventful.Stream(model) for _ in clips]
    mixed = [
        [run(entry, s, f) for s, f in zip(streams, pair, strict=True)]
        for pair in zip(*clips, strict=True)
    ]
    for which, clip in enumerate(clips):
        alone = eventful.Stream(model)
        for t, frame in enumerate(clip):
            assert torch.equal(run(entry, alone, frame), mixed[t][which])


def check_snapshot(entry, config, path):
    model = eventful.convert(made(entry), config)
    clip = moving_square(5, entry.size, noise=0.05)
    straight, broken = eventful.Stream(model), eventful.Stream(model)
    for frame in clip[:2]:
        run(entry, straight, frame)
        run(entry, broken, frame)
    broken.policy = straight.policy = TopR(5)
    broken.snapshot(path)
    resumed = eventful.Stream.load(model, path)
    assert resumed.policy == TopR(5)
    resumed.policy = straight.policy = config.policy
    for frame in clip[2:]:
        assert torch.equal(run(entry, resumed, frame), run(entry, straight, frame))


@pytest.mark.in_turn(2)
def test_a_snapshot_goes_on_as_if_never_stopped(entry, preset, tmp_path):
    check_snapshot(entry, preset(NoiseThreshold()), tmp_path / "stream.safetensors")


@in_turn({"top": TopFraction(0.3), "threshold": Threshold(0.5)})
def test_a_snapshot_goes_on_under_every_rule(family, config, tmp_path):
    check_snapshot(family, config, tmp_path / "stream.safetensors")


def check_batch(entry, config):
    """Streams join and leave, skip frames, and select ragged numbers of tokens."""
    model = eventful.convert(made(entry), config)
    clips = {name: moving_square(6, entry.size, noise=0.05, seed=i) for i, name in enumerate("abc")}
    plan = [("a",), ("a", "b"), ("a", "b", "c"), ("c", "a"), ("b", "c"), ("b",)]
    batch, alone, ragged = eventful.StreamBatch(model), {}, False
    for t, names in enumerate(plan):
        for name in names:
            if name not in batch.streams:
                batch.join(name)
                alone[name] = eventful.Stream(model)
        frames = torch.cat([clips[name][t] for name in names])
        got = run(entry, functools.partial(batch, streams=names), frames)
        counts = next(iter(batch.last.gates.values())).counts
        ragged |= len(set(counts.tolist())) > 1
        for row, name in enumerate(names):
            expected = run(entry, alone[name], clips[name][t])
            assert_near(got[row : row + 1], expected, note=(t, name))
        if t == 4:
            batch.leave("c")
    assert ragged


@pytest.mark.in_turn(3)
def test_a_batch_equals_single_streams(entry, preset):
    check_batch(entry, preset(Threshold(1.0)))


@in_turn({"top": TopFraction(0.3), "noise": NoiseThreshold(k=2)})
def test_a_batch_equals_single_streams_under_every_rule(family, config):
    check_batch(family, config)


def test_streams_of_a_batch_keep_their_own_policies(flow):
    model = eventful.convert(made(flow), Config.exact())
    policies = {"a": TopR(2), "b": NoiseThreshold(), "c": Threshold(0.5)}
    batch = eventful.StreamBatch(model)
    for name, policy in policies.items():
        batch.join(name, policy)
    alone = {name: eventful.Stream(model, policy) for name, policy in policies.items()}
    for t in range(5):
        frames = {
            n: moving_square(5, flow.size, noise=0.05, seed=i)[t] for i, n in enumerate("abc")
        }
        stacked = torch.cat(list(frames.values()))
        got = flow.output(flow.call(batch, stacked))
        for row, name in enumerate(policies):
            assert_near(got[row : row + 1], run(flow, alone[name], frames[name]))


CONVERGE = ("tokenwise", "delta-qk", "exact")


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", CONVERGE)
def test_after_motion_stops_the_reference_rules_reach_dense(entry, name):
    model = made(entry)
    count = tokens(model, entry)
    r = count // 4 + 5  # room for changes beside at most 5 special tokens, which count toward r
    depth = eventful.inspect(model, entry.size).matched
    frames = 2 * depth * math.ceil(count / r)
    assert_near(*when_still(entry, model, RULES[name](TopR(r)), frames))


@pytest.mark.parametrize("name", ["fast", "block"])
def test_after_motion_stops_max_age_reaches_dense(entry, name):
    model = made(entry)
    depth = eventful.inspect(model, entry.size).matched
    gating = {"fast": "frame", "block": "block"}[name]
    config = Config(TopR(1), gating=gating, max_age=5)
    assert_near(*when_still(entry, model, config, depth * 5))


@pytest.mark.parametrize("name", ["delta-av", "paper", "stgt"])
def test_delta_and_stgt_never_reach_dense(flow, name):
    """The A gate keeps stale weights on unchanged keys; the previous frame forgets changes."""
    model = made(flow)
    error = apart(*when_still(flow, model, RULES[name](TopR(4)), 40))
    assert error > 100 * limit("model")


def when_still(entry, model, config, frames):
    """What a stream gives some frames after motion stopped, and what the model gives."""
    clip = then_still(moving_square(3, entry.size), frames)
    stream = eventful.Stream(eventful.convert(model, config))
    for frame in clip:
        got = run(entry, stream, frame)
    return got, run(entry, model, clip[-1])
