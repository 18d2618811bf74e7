"""The simulation of a cluster: laws, closed forms, and a plain reference."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventful.cluster.placement import Placement
from eventful.cluster.simulate.costs import MEASURED, Costs, names
from eventful.cluster.simulate.fleet import Fleet
from eventful.cluster.simulate.run import gpus_needed, simulate
from eventful.cluster.simulate.ticks import Seats, work
from eventful.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster_costs import collected

CALM = Fleet(
    cameras=12, gpus=4, node=2, hours=0.02, shares=(0.1,), spread=0, busy_cameras=0, cuts=0,
    camera_days=0, worker_days=0, node_days=0, registry_days=0,
)  # fmt: skip
COSTS = Costs(
    tokens=1000, state_bytes=10**8, most=8, fixed=1.0, per_stream=0.5, per_token=0.001,
    dense_fixed=0.5, dense_per_stream=2.0,
)  # fmt: skip


def balanced(made) -> bool:
    return made.sent == made.done.sum() + made.dropped.sum() + made.lost.sum()


fleets = st.builds(
    Fleet,
    cameras=st.integers(1, 40),
    gpus=st.integers(1, 6),
    node=st.integers(1, 3),
    fps=st.sampled_from([2.0, 12.5, 25.0]),
    hours=st.just(0.01),
    spread=st.sampled_from([0.0, 1.0]),
    cuts=st.sampled_from([0.0, 2000.0]),
    camera_days=st.sampled_from([0.0, 1e-4]),
    camera_gone=st.sampled_from([0.5, 10.0]),
    worker_days=st.sampled_from([0.0, 1e-4, 1e-3]),
    worker_back=st.sampled_from([0.5, 20.0]),
    node_days=st.sampled_from([0.0, 1e-4]),
    node_back=st.sampled_from([1.0, 30.0]),
    registry_days=st.sampled_from([0.0, 1e-4]),
    look=st.sampled_from([1.0, 10.0]),
    memory=st.sampled_from([2e8, 1e11]),
)


@settings(deadline=None, max_examples=40)
@given(fleets, st.integers(0, 2**16), st.floats(0.01, 30))
def test_every_frame_is_done_dropped_or_lost(fleet: Fleet, seed: int, slower: float) -> None:
    """Also: what is counted by minute and by latency adds up, and equal seeds are equal."""
    costs = replace(COSTS, fixed=slower, per_stream=slower / 2)
    made = simulate(fleet, costs, seed)
    assert balanced(made)
    assert made.latency.sum() == made.done.sum()
    counted = made.minutes[:3].sum(axis=1)
    assert counted.tolist() == [made.done.sum(), made.dropped.sum(), made.lost.sum()]
    assert made.minutes[3].sum() == pytest.approx(made.busy.sum())
    # A running step may reach over the end of a worker's time.
    longest = costs.step_ms(costs.most, costs.most * costs.tokens)
    deaths = sum(made.events.values())
    assert (made.busy <= made.alive * fleet.tick_ms + longest * (1 + deaths)).all()
    again = simulate(fleet, costs, seed)
    assert (again.done == made.done).all()
    assert (again.latency == made.latency).all()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 24), st.integers(3, 6), st.integers(0, 99))
def test_without_failures_and_with_little_load_nothing_is_missing(
    cameras: int, gpus: int, seed: int
) -> None:
    made = simulate(replace(CALM, cameras=cameras, gpus=gpus), COSTS, seed)
    assert made.done.sum() == made.sent == cameras * CALM.ticks
    assert made.flushes == cameras
    assert not made.recoveries


def test_one_camera_is_the_closed_form() -> None:
    """Deterministic: utilisation is s / T, and latency is read + wait + s."""
    fleet = replace(CALM, cameras=1, gpus=1, read=7.0)
    made = simulate(fleet, COSTS)
    first, step = COSTS.step_ms(1, 1000), COSTS.step_ms(1, 100)
    ticks = fleet.ticks
    assert made.busy.sum() == pytest.approx(first + (ticks - 1) * step)
    lowest, highest = np.flatnonzero(made.latency)[[0, -1]] * 0.25
    assert highest - lowest <= first - step + 0.25
    assert 7 + step - 0.25 <= lowest <= 7 + fleet.tick_ms + step


def test_waiting_is_uniform_over_the_interval() -> None:
    fleet = replace(CALM, cameras=400, gpus=400, node=8, read=0.0)
    made = simulate(fleet, COSTS)
    step = COSTS.step_ms(1, 100)
    assert made.percentile(0.5) == pytest.approx(fleet.tick_ms / 2 + step, abs=3)
    assert made.percentile(0.99) == pytest.approx(fleet.tick_ms * 0.99 + step, abs=2)


@pytest.mark.parametrize(("step_ms", "share"), [(50.0, 40 / 50), (80.0, 1 / 2), (400.0, 1 / 10)])
def test_an_overloaded_worker_computes_what_its_time_allows(step_ms: float, share: float) -> None:
    """One step of s ms in intervals of T ms: a share T / s of the frames, and no idle time."""
    fleet = replace(CALM, cameras=1, gpus=1, hours=0.2)
    costs = replace(COSTS, fixed=step_ms, per_stream=0, per_token=0)
    made = simulate(fleet, costs)
    assert made.done.sum() / made.sent == pytest.approx(share, rel=0.01)
    assert made.utilisation[0] == pytest.approx(1.0, rel=0.01)


def test_a_dead_worker_loses_what_its_notice_takes() -> None:
    """Streams of a dead worker are without one for `notice`, and are flushed by the next."""
    fleet = replace(CALM, worker_days=0.002, notice=2.0, worker_back=30.0, hours=0.1)
    made = simulate(fleet, COSTS, seed=3)
    assert made.events["workers"] >= 3
    moved = [time for time in made.recoveries if time != 30.0]
    assert moved
    assert min(moved) == 2.0
    lost = made.lost[0].sum()
    assert lost == round(sum(made.recoveries) * fleet.fps)
    assert made.flushes == fleet.cameras + len(made.recoveries)


def test_while_the_registry_is_down_leases_stay_and_workers_run() -> None:
    fleet = replace(CALM, registry_days=0.0005, registry_back=20.0, hours=0.1)
    made = simulate(fleet, COSTS)
    assert made.events["registry"] >= 3
    assert made.done.sum() == made.sent
    both = replace(fleet, worker_days=0.0005, notice=1.0, worker_back=3.0)
    made = simulate(both, COSTS, seed=1)
    assert made.lost[2].sum() > 0
    assert max(made.recoveries) > 3.0
    assert balanced(made)


def test_a_machine_takes_its_workers_and_without_others_all_frames() -> None:
    fleet = replace(CALM, gpus=2, node=2, node_days=0.001, node_back=10.0, hours=0.1)
    made = simulate(fleet, COSTS)
    assert min(made.recoveries) == 10.0
    again = [time for time in made.recoveries if time != 10.0]  # it died again while it was down
    assert len(again) < len(made.recoveries) / 4
    assert len(made.recoveries) % fleet.cameras == 0
    ends = made.lost[1].sum() - round(sum(made.recoveries) * fleet.fps)
    assert 0 <= ends <= 10 * fleet.fps * fleet.cameras  # one may last at the end
    assert made.lost[1].sum() > 0


def test_streams_without_memory_are_named() -> None:
    fleet = replace(CALM, cameras=10, gpus=2, memory=3.5e8)
    made = simulate(fleet, COSTS)
    assert (made.lost[3] > 0).sum() == 10 - 2 * 3
    assert made.to_dict()["frames"]["worst_cameras"]


def test_a_full_worker_hands_streams_on() -> None:
    """All streams at one worker at first, as after a restart of the others."""

    class AllAtFirst(Placement):
        def place(self, stream, workers):
            return "0"

    fleet = replace(CALM, cameras=40, hours=0.1)
    costs = replace(COSTS, per_stream=2.0)
    made = simulate(fleet, costs, placement=AllAtFirst())
    assert made.moves > 10
    assert made.dropped.sum() > 0
    assert made.dropped.sum() == made.minutes[1, :4].sum()  # none after the moves
    # Each move costs a flush; so does each start, unless the stream is moved before it ran.
    assert made.moves < made.flushes <= fleet.cameras + made.moves


def reference(frames, costs, tick_ms, most, left):
    """One worker in plain Python: numbers of computed frames by interval, and its busy time."""
    done, busy = [], 0.0
    for tokens in frames:
        now, count = left, 0
        for start in range(0, len(tokens), most):
            step = tokens[start : start + most]
            if now >= tick_ms:
                break
            took = costs.step_ms(len(step), sum(step))
            now, busy, count = now + took, busy + took, count + len(step)
        left = max(now - tick_ms, 0.0)
        done.append(count)
    return done, busy, left


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_workers_are_those_of_a_plain_loop(data: st.DataObject) -> None:
    count, workers = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 4))
    most, intervals = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 12))
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    worker = random.integers(0, workers, count)
    seats = Seats.of(worker, np.arange(count), most, data.draw(st.integers(0, 40)))
    tokens = random.integers(0, 8000, (intervals, count)).astype(float)
    left = random.uniform(0, 60, workers)
    made = work(seats, tokens, COSTS, left, 20.0, np.zeros(workers, bool))
    for own in range(workers):
        at = seats.worker == own
        done, busy, after = reference(tokens[:, at].tolist(), COSTS, 20.0, most, left[own])
        assert made.done[:, at].sum(axis=1).tolist() == done
        assert made.busy[:, own].sum() == pytest.approx(busy)
        assert made.left[own] == pytest.approx(after)


def test_costs_are_those_of_the_stored_results() -> None:
    assert json.loads(MEASURED.read_text()) == json.loads(json.dumps(collected()))
    for name in names():
        assert Costs.measured(name).gap < 0.2
    with pytest.raises(ConfigError, match="h200-vit-b-1024"):
        Costs.measured("tpu")


def test_a_fit_finds_its_own_factors_again_and_none_below_zero() -> None:
    grid = [[b, t, COSTS.step_ms(b, t)] for b in (1, 4, 8) for t in (100, 4000)]
    points = {
        "tokens": 1000, "state_bytes": 1, "steps": grid, "dense": [[1, 2.5], [8, 16.5]],
        "device": "d", "from": "f", "commits": ["c"],
    }  # fmt: skip
    made = Costs.fitted(points)
    assert (made.fixed, made.per_stream, made.per_token) == pytest.approx((1.0, 0.5, 0.001))
    assert (made.dense_fixed, made.dense_per_stream) == pytest.approx((0.5, 2.0))
    assert made.gap == pytest.approx(0, abs=1e-9)
    falling = Costs.fitted({**points, "dense": [[1, 2.0], [8, 32.0]]})
    assert falling.dense_fixed == 0


def test_gpus_needed_is_the_first_number_that_is_enough() -> None:
    fleet = replace(CALM, cameras=60)
    costs = replace(COSTS, per_stream=3.0)
    needed = gpus_needed(fleet, costs, 0.01)
    assert needed is not None
    short = replace(fleet, hours=0.1 if fleet.hours > 0.1 else fleet.hours)
    assert simulate(replace(short, gpus=needed), costs).missing_share <= 0.01
    assert simulate(replace(short, gpus=needed - 1), costs).missing_share > 0.01
    assert gpus_needed(fleet, replace(costs, fixed=100.0), 0.01) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cameras": 0}, "cameras must be above 0"),
        ({"cuts": -1.0}, "cuts must not be below 0"),
        ({"shares": ()}, "shares"),
        ({"busy_cameras": 2.0}, "busy_cameras"),
    ],
)
def test_impossible_fleets_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CALM, **changed)
    with pytest.raises(ConfigError, match="not measured"):
        simulate(replace(CALM, most=9), COSTS)


def test_the_command_prints_json_and_writes_a_picture(tmp_path: Path) -> None:
    arguments = [
        *("cluster", "simulate", "--cameras", "20", "--gpus", "2", "--hours", "0.02", "--json"),
        *("--set", "worker_days=0.01", "--out", str(tmp_path)),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "eventful.cli", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["fleet"]["worker_days"] == 0.01
    assert printed["assumptions"]
    assert json.loads((tmp_path / "simulation.json").read_text())["frames"] == printed["frames"]
    assert (tmp_path / "simulation.png").stat().st_size > 10_000


def test_the_step_that_runs_when_a_worker_dies_is_lost() -> None:
    """Steps of 60 ms in intervals of 40 ms: two of three ends of intervals are inside a step."""
    fleet = replace(
        CALM, cameras=1, gpus=1, node=1, worker_days=0.0002, worker_back=1.0, notice=5.0, hours=0.5
    )
    made = simulate(fleet, replace(COSTS, fixed=60.0, per_stream=0, per_token=0))
    deaths = made.events["workers"]
    spread = 3 * (2 / 9 / deaths) ** 0.5  # three standard deviations
    assert made.lost[4].sum() / deaths == pytest.approx(2 / 3, abs=spread)
    assert balanced(made)
