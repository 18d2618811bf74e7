"""Never slower than dense: what steps cost is measured, and dense runs where it is cheaper."""

from __future__ import annotations

import json

import pytest
import torch

import eventful
import zoo_timm
from clips import moving_square
from eventful import Config, Stream, StreamBatch, TopFraction, TopR
from eventful.costs import Costs

N = 1000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENTFUL_CACHE", str(tmp_path))
    monkeypatch.setenv("EVENTFUL_FALLBACK", "1")
    return tmp_path / "costs.json"


def costs_of(dense: list[float], steps: dict[int, float], key: str = "k") -> Costs:
    made = Costs(key, N)
    for ms in dense:
        made.note(N, ms, dense=True)
    for updated, ms in steps.items():
        for _ in range(3):
            made.note(updated, ms, dense=False)
    return made


class TestBreakEven:
    def test_half_before_anything_is_known(self):
        assert Costs("k", N).most == 500
        assert costs_of([10.0], {}).most == 500

    def test_time_that_grows_with_the_tokens(self):
        """t = 2 + 10 M / N breaks even with 10 at 0.8 N; an estimate must not lie beyond."""
        line = costs_of([10.0], {m: 2 + 10 * m / N for m in (100, 300, 500, 700, 900)})
        assert 700 <= line.most <= 900
        assert line.most >= costs_of([8.0], {m: 2 + 10 * m / N for m in (100, 300, 500)}).most

    def test_one_class_known(self):
        """Beyond what was seen, time is taken to grow as the tokens do."""
        assert 230 <= costs_of([10.0], {125: 5.0}).most <= 260

    def test_dense_is_always_cheaper(self):
        assert costs_of([1.0], {31: 3.0, 250: 5.0}).most == 0

    def test_a_class_is_believed_from_three_samples(self):
        made = costs_of([10.0], {})
        made.note(125, 50.0, dense=False)
        assert made.most == 500

    def test_wants_a_dense_step_to_compare_with(self):
        assert costs_of([], {125: 5.0}).wants_dense
        assert costs_of([], {125: 5.0}).most == 0
        assert not costs_of([9.0], {125: 5.0}).wants_dense


class TestCache:
    def test_survives_the_process(self, cache):
        costs_of([10.0, 11.0], {125: 5.0, 500: 9.0}).save()
        assert Costs("k", N).most == costs_of([10.0, 11.0], {125: 5.0, 500: 9.0}, "other").most
        assert Costs("another", N).most == 500

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"k": 3}', '{"k": {"dense": "x"}}'])
    def test_a_damaged_file_is_no_obstacle(self, cache, text):
        cache.write_text(text)
        made = Costs("k", N)
        assert made.most == 500
        made.save()

    def test_keys_live_side_by_side(self, cache):
        costs_of([1.0], {125: 2.0}, "a").save()
        costs_of([1.0], {125: 2.0}, "b").save()
        assert set(json.loads(cache.read_text())) == {"a", "b"}

    def test_nowhere_to_write(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("EVENTFUL_CACHE", str(tmp_path / "file" / "below"))
        costs_of([1.0], {125: 2.0}).save()


@pytest.fixture(params=["plain", "resident"])
def way(request, monkeypatch):
    if request.param == "resident":
        monkeypatch.setattr("eventful.residence.DEVICES", {"cpu"})
    return request.param


def known(monkeypatch, most: int) -> None:
    monkeypatch.setattr(Costs, "most", most)


class TestStream:
    @pytest.fixture
    def model(self):
        torch.manual_seed(7)
        return zoo_timm.ZOO["vit"].make()

    @pytest.fixture
    def clip(self):
        return moving_square(4, zoo_timm.ZOO["vit"].size, noise=0.05)

    @pytest.mark.parametrize("preset", ["fast", "exact"])
    def test_falls_back_and_says_so(self, model, clip, preset, way, monkeypatch):
        known(monkeypatch, 8)
        stream = Stream(eventful.convert(model, Config.preset(preset, TopR(10))))
        for t, frame in enumerate(clip):
            got = stream(frame)
            assert stream.last.fallback == (t > 0)
            assert stream.last.flushed == [True]
            with torch.no_grad():
                torch.testing.assert_close(got, model(frame), rtol=1e-4, atol=1e-4)
        stream.policy = TopR(3)
        stream(clip[0])
        assert not stream.last.fallback
        assert stream.last.flushed == [False]

    def test_not_if_told_so(self, model, clip, way, monkeypatch):
        known(monkeypatch, 0)
        config = Config.fast(TopFraction(0.9), fallback=False)
        for stream in (Stream(eventful.convert(model, config)), None):
            if stream is None:
                monkeypatch.setenv("EVENTFUL_FALLBACK", "0")
                stream = Stream(eventful.convert(model, Config.fast(TopFraction(0.9))))
            for frame in clip:
                stream(frame)
                assert not stream.last.fallback
            assert stream.last.flushed == [False]

    def test_the_published_presets_never_do(self):
        assert not any(Config.preset(name).fallback for name in ("paper", "tokenwise", "stgt"))

    def test_a_batch(self, model, clip, way, monkeypatch):
        known(monkeypatch, 8)
        batch = StreamBatch(eventful.convert(model, Config.fast(TopR(3))))
        batch.join("a")
        batch.join("b", TopR(10))
        frames = [torch.cat([frame, frame.flip(-1)]) for frame in clip]
        for frame in frames[:2]:
            batch(frame)
        assert batch.last.fallback
        assert batch.last.flushed == [True, True]

    def test_measures_itself(self, model, clip, monkeypatch, cache):
        """A stream of an unknown model runs one dense step to compare with, and remembers."""
        stream = Stream(eventful.convert(model, Config.fast(TopR(5), scene_cut=None)))
        for t in range(12):
            stream(clip[t % 4])
        (costs,) = stream._costs.values()
        assert not costs.wants_dense
        assert len(costs._dense) >= 1
        assert json.loads(cache.read_text())
