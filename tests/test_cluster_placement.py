"""Which worker gets which stream, and when a process counts as dead: with made-up clocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventful.cluster.links import LinkDead, LinkDown, LinkLate
from eventful.cluster.placement import Limits, Move, Placement
from eventful.cluster.watch import Watch
from eventful.errors import ConfigError


def placement(**loads: float) -> Placement:
    return Placement(Limits(patience=5, cooldown=30), dict(loads))


def test_a_stream_goes_to_the_emptiest_worker_by_measured_load():
    one = placement(a=0.6, b=0.1, c=0.1, d=0.1)
    assert one.place("new", {"w0": ["a"], "w1": ["b", "c", "d"]}) == "w1"
    assert one.place("new", {}) is None
    full = Placement(Limits(most=1))
    assert full.place("new", {"w0": ["a"]}) is None


def test_a_full_worker_waits_before_it_gives_a_stream_away():
    one = placement(a=0.5, b=0.6, c=0.1)
    workers = {"w0": ["a", "b"], "w1": ["c"]}
    assert one.next_move(workers, 0.0) is None
    assert one.next_move(workers, 4.9) is None
    assert one.next_move(workers, 5.0) == Move("a", "w1")  # the smallest that suffices


def test_a_short_peak_moves_nothing():
    one = placement(a=0.5, b=0.6, c=0.1)
    workers = {"w0": ["a", "b"], "w1": ["c"]}
    assert one.next_move(workers, 0.0) is None
    one.loads["b"] = 0.2
    assert one.next_move(workers, 4.0) is None
    one.loads["b"] = 0.6
    assert one.next_move(workers, 6.0) is None  # it counts anew


def test_between_full_and_target_nothing_moves():
    one = placement(a=0.45, b=0.4, c=0.1)
    assert all(one.next_move({"w0": ["a", "b"], "w1": ["c"]}, t) is None for t in range(100))
    two = placement(a=0.5, b=0.5, c=0.38)  # full, but too little would be gained
    assert all(two.next_move({"w0": ["a", "b"], "w1": ["c"]}, t) is None for t in range(100))


def test_a_stream_that_moved_stays_for_a_while():
    one = placement(a=0.6, b=0.5)
    assert one.next_move({"w0": ["a", "b"], "w1": []}, 0.0) is None
    assert one.next_move({"w0": ["a", "b"], "w1": []}, 5.0) == Move("b", "w1")
    one.loads["b"] = 0.95  # a busy camera: it would go back
    workers = {"w0": ["a"], "w1": ["b"]}
    assert all(one.next_move(workers, t) is None for t in range(6, 34))


def test_where_all_are_full_the_fullest_one_is_relieved():
    one = placement(a=0.8, b=0.8, c=0.8, d=0.8, e=0.2)
    workers = {"w0": ["a", "b", "c", "e"], "w1": ["d"]}
    one.next_move(workers, 0.0)
    assert one.next_move(workers, 5.0) == Move("a", "w1")


def test_streams_of_a_dead_worker_go_where_they_crowd_nobody_too_much():
    one = placement(a=0.9, b=0.7, c=0.5, d=0.4)
    assert one.rooms(["a", "b", "c"], {"w1": ["d"]}) == [Move("a", "w1"), Move("b", "w1")]
    assert one.rooms(["a"], {}) == []


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.01, 0.6), min_size=1, max_size=24), st.integers(2, 5))
def test_moves_end(loads, count):
    """Nothing goes to and fro: loads that do not change come to rest, and nobody is worse off."""
    one = Placement(Limits(cooldown=0), {str(i): load for i, load in enumerate(loads)})
    workers: dict[str, list[str]] = {f"w{i}": [] for i in range(count)}
    workers["w0"] = [str(i) for i in range(len(loads))]
    moves = 0
    for turn in range(400):
        move = one.next_move(workers, 5.0 * turn)
        if move is not None:
            before = max(map(one.load, workers.values()))
            for own in workers.values():
                if move.stream in own:
                    own.remove(move.stream)
            workers[move.worker].append(move.stream)
            assert max(map(one.load, workers.values())) <= before
            moves, last = moves + 1, turn
    assert moves <= 4 * len(loads)
    assert not moves or last < 300


@pytest.mark.parametrize("values", [{"target": 0.95}, {"most": 0}, {"crowded": 0.5}])
def test_limits_that_cannot_work_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        Limits(**values)


class Process:
    """A process that answers, is silent, or is gone."""

    def __init__(self) -> None:
        self.mode, self.answer = "silent", {"started": 1.0, "quiet": 0.0}

    def send(self, method, *args):
        if self.mode == "gone":
            raise LinkDown("gone")
        return self

    @property
    def there(self) -> bool:
        return self.mode != "silent"

    def get(self, seconds):
        if self.mode == "gone":
            raise LinkDown("gone")
        if self.mode == "dead":
            raise LinkDead("no such model")
        if self.mode == "late":
            raise LinkLate("late")
        return dict(self.answer)


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def watch() -> Watch:
    return Watch("w0", "health", deadline=3.0, start_deadline=60.0)


def test_a_process_may_take_long_to_start(process, watch):
    assert [watch.turn(process, t) for t in (0, 30, 60)] == ["starting"] * 3
    assert watch.turn(process, 60.1) == "hung"


def test_silence_beyond_the_deadline_is_a_hang(process, watch):
    process.mode = "answers"
    watch.turn(process, 0)
    assert watch.turn(process, 1) == "up"
    process.mode = "silent"
    assert watch.turn(process, 4.0) == "up"
    assert watch.turn(process, 4.1) == "hung"


def test_work_that_stands_still_is_a_hang_though_the_process_answers(process, watch):
    process.mode = "answers"
    watch.turn(process, 0)
    process.answer["quiet"] = 3.5
    assert watch.turn(process, 1) == "hung"


def test_the_first_step_may_take_longer(process, watch):
    process.mode, process.answer["phase"], process.answer["quiet"] = "answers", "first step", 20.0
    watch.turn(process, 0)
    assert watch.turn(process, 1) == "up"


def test_a_process_that_is_gone_for_good_says_why(process, watch):
    process.mode = "dead"
    watch.turn(process, 0)
    watch.turn(process, 1)
    assert watch.dead == "no such model"
    process.mode = "answers"
    watch.turn(process, 2)
    watch.turn(process, 3)
    assert not watch.dead
    assert watch.life == "up"


def test_a_process_that_is_gone_and_comes_back(process, watch):
    process.mode = "answers"
    watch.turn(process, 0)
    watch.turn(process, 1)
    process.mode = "gone"
    assert watch.turn(process, 2) == "down"
    process.mode, process.answer["started"] = "answers", 2.0
    watch.turn(process, 3)
    assert watch.turn(process, 4) == "up"
    assert watch.again == 1
    process.mode = "late"
    assert watch.turn(process, 5) == "up"
