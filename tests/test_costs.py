"""What steps cost: the break-even between dense and eventful steps, and the file that keeps it."""

from __future__ import annotations

import json
import multiprocessing
import os
import time

import pytest

from eventful.cost.times import ENOUGH, KEPT, Costs

N = 1600  # 100 tokens to each of the 16 classes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENTFUL_CACHE", str(tmp_path))
    return tmp_path / "costs.json"


def costs_of(dense: list[float], steps: dict[int, float], key: str = "k") -> Costs:
    made = Costs(key, N)
    for ms in dense:
        made.note(0, ms, dense=True)
    for count, ms in steps.items():
        for _ in range(ENOUGH):
            made.note(count, ms, dense=False)
    return made


class TestBreakEven:
    def test_all_tokens_before_anything_is_known(self):
        assert Costs("k", N).break_even == N
        assert costs_of([10.0], {}).break_even == N
        assert costs_of([], {800: 5.0}).break_even == N

    def test_lies_below_the_first_class_that_costs_more(self):
        """t = 2 + 10 M / N breaks even with 10 at 0.8 N: the class of 1400 is the first beyond."""
        line = costs_of([10.0], {m: 2 + 10 * m / N for m in (200, 600, 1000, 1200, 1400)})
        assert line.break_even == 1350
        assert not line.beyond(1350, 1350)
        assert line.beyond(1351, 1351)

    def test_under_a_ceiling_times_are_taken_to_grow_on_as_they_did(self):
        """t = 2 + 10 M / N again, seen up to half of the tokens; 10.5 ms are as good as 10."""
        line = costs_of([10.0], {m: 2 + 10 * m / N for m in (200, 800)})
        assert (line.break_even, line.expected_break_even) == (N, 1360)
        assert not line.beyond(1360, 800)
        assert line.beyond(1361, 800)
        assert not line.beyond(1361, 1361)  # nothing of the kind was seen: it is tried first
        assert costs_of([10.0], {200: 5.0, 800: 5.0}).expected_break_even == N
        assert costs_of([10.0], {800: 8.0}).expected_break_even == 1050
        assert costs_of([10.0], {}).expected_break_even == N
        assert costs_of([], {800: 8.0}).expected_break_even == N

    def test_a_step_as_slow_as_dense_is_worth_it(self):
        assert costs_of([10.0], {800: 10.4}).break_even == N
        assert costs_of([10.0], {800: 10.6}).break_even == 750

    def test_returning_takes_fewer_tokens(self):
        line = costs_of([10.0], {m: 2 + 10 * m / N for m in (200, 1400)})
        assert line.beyond(1216, 1216, share=0.9)
        assert not line.beyond(1215, 1215, share=0.9)

    def test_dense_is_always_cheaper(self):
        assert costs_of([1.0], {50: 3.0, 400: 5.0}).break_even == 50
        assert costs_of([1.0], {50: 3.0}).beyond(51, 51)

    def test_a_class_is_believed_from_three_samples(self):
        made = costs_of([10.0], {})
        for _ in range(ENOUGH - 1):
            made.note(200, 50.0, dense=False)
        assert made.break_even == N
        made.note(200, 50.0, dense=False)
        assert made.break_even == 150

    def test_the_lowest_of_the_recent_times_counts(self):
        """Other load only ever adds; times from long ago are of another machine."""
        made = costs_of([10.0], {200: 4.0})
        for _ in range(KEPT - 1):
            made.note(200, 40.0, dense=False)
        assert made.break_even == N
        made.note(200, 40.0, dense=False)
        assert made.break_even == 150

    def test_a_first_frame_is_only_an_upper_bound(self):
        """It takes up to 1.5 times as long as later ones: a step of 2/3 of it is in doubt."""
        made = costs_of([], {200: 4.0})
        made.note_first(6.1)
        assert not made.beyond(200, 200)
        made.note_first(5.9)
        assert made.beyond(200, 200)
        made.note(0, 5.0, dense=True)
        assert not made.beyond(200, 200)

    def test_without_any_dense_time_half_of_the_tokens_are_in_doubt(self):
        made = costs_of([], {800: 4.0})
        assert not made.beyond(N // 2, N // 2)
        assert made.beyond(N // 2 + 1, N // 2 + 1)
        assert not made.beyond(N, N)  # no step like that was timed yet

    def test_a_clock_that_stands_still_says_nothing(self):
        made = costs_of([0.0], {800: 0.0, 1600: 0.0})
        made.note_first(0.0)
        assert not made.dense_known
        assert not made.compared(800)
        assert not made.beyond(N, N)

    def test_steps_in_flight_are_read_later(self):
        made, read = Costs("k", N), []

        def clock(ms):
            return lambda: read.append(ms) or ms

        for ms in (1.0, 2.0, 3.0):
            made.note_later(0, clock(ms), dense=True)
        assert read == [1.0]


def write_many(keys):
    for key in keys:
        costs_of([1.0], {200: 2.0}, key).save()


class TestCache:
    def test_survives_the_process(self):
        costs_of([10.0, 11.0], {200: 5.0, 800: 19.0}).save()
        assert Costs("k", N).break_even == 750
        assert Costs("another", N).break_even == N

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"k": 3}', '{"k": {"dense": "x"}}'])
    def test_a_damaged_file_is_no_obstacle(self, cache, text):
        cache.write_text(text)
        made = Costs("k", N)
        assert made.break_even == N
        made.save()
        assert "k" in json.loads(cache.read_text())

    def test_two_writers_lose_nothing(self, cache):
        context = multiprocessing.get_context("fork")
        keys = [[f"{name}{i}" for i in range(25)] for name in "ab"]
        writers = [context.Process(target=write_many, args=(some,)) for some in keys]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
            assert writer.exitcode == 0
        assert set(json.loads(cache.read_text())) == {*keys[0], *keys[1]}
        assert os.listdir(cache.parent) == [cache.name]

    def test_a_writer_that_was_killed_does_not_block_the_others(self, cache):
        lock = cache.with_name(cache.name + ".lock")
        lock.touch()
        long_ago = time.time() - 60
        os.utime(lock, (long_ago, long_ago))
        costs_of([1.0], {200: 2.0}).save()
        assert "k" in json.loads(cache.read_text())

    def test_nowhere_to_write(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("EVENTFUL_CACHE", str(tmp_path / "file" / "below"))
        costs_of([1.0], {200: 2.0}).save()
