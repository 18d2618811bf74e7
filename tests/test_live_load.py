"""One minute of `eventful live` under load: memory, latency and drops (benchmarks/live_load.py)."""

# ruff: noqa: E402  (libraries that may be missing come first)
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

for library in ("fastapi", "uvicorn", "websockets", "timm", "av"):
    pytest.importorskip(library)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import live_load


def test_the_page_has_the_stored_numbers():
    stored = json.loads(live_load.RESULTS.read_text())
    assert live_load.table(stored) in live_load.PAGE.read_text(), "--table writes it anew"
    assert stored["minutes"] == 10


@pytest.mark.parametrize("kind", live_load.MEMORY)
def test_memory_of_the_stored_ten_minutes_is_flat(kind):
    grown = json.loads(live_load.RESULTS.read_text())["memory_mb"][kind]["second_half"]
    assert grown["mb_a_minute"] < 2 * grown["standard_error"]


def test_growth_is_found_below_what_comes_and_goes():
    """Half a megabyte in each block of time, under pictures of up to 15 MB."""
    seen = [live_load.Memory(t / 2, 0, 300 + t / 40 + 15 * (t % 3 == 0)) for t in range(240)]
    found = live_load._memory(seen, "allocated", 2)
    assert found["warm"]["mb_a_minute"] == pytest.approx(3.0, rel=0.05)
    assert live_load._memory(seen, "resident", 2)["second_half"]["mb_a_minute"] == 0


@pytest.mark.slow
def test_memory_is_flat_latency_bounded_and_drops_are_counted():
    result = live_load.measure(1)
    assert result["states"] == ["running"]
    # Sources take turns: on a busy machine there are fewer steps, of each as many.
    assert result["fewest_steps"] >= 0.8 * result["steps"] / result["sources"] > 1
    # A frame is stepped, dropped, in its slot or at work.
    assert 0 <= result["not_counted"] <= 2 * result["sources"]
    # Without a queue a frame is taken in the turn that follows on its arrival: the latencies of a
    # source cover each moment at most twice, however long its turns are.
    turn = 60_000 * result["sources"] / result["steps"]
    assert result["latency_ms"]["mean"] < 2 * turn
    # In the first minute code for few more numbers of tokens is made: 5 to 25 MB were seen, and 57
    # where each number has code of its own. tests/test_linears.py tells them apart by steps.
    assert result["memory_mb"]["allocated"]["warm"]["mb_a_minute"] < 30
    # The slow viewer is behind by its own pictures on the way, not by a queue that grows.
    assert result["slow_viewer"]["most_steps_behind"] < 10 * 3 * live_load.SLOW
    # It gets a picture every two seconds, and the other one about as many as there are steps.
    assert result["viewers"]["fast"]["pictures"] > 3 * result["viewers"]["slow"]["pictures"]
