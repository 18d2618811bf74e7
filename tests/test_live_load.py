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


@pytest.mark.slow
def test_memory_is_flat_latency_bounded_and_drops_are_counted():
    result = live_load.measure(1)
    assert result["states"] == ["running"]
    assert result["steps"] >= 8 * 60  # each source once a second, also on a busy machine
    # A frame is stepped, dropped, in its slot or at work.
    assert 0 <= result["not_counted"] <= 2 * result["sources"]
    assert result["latency_ms"]["highest"] < 3000
    memory = result["memory_mb"]
    assert memory["last_quarter"] < 1.08 * memory["first_quarter"]
    # The slow viewer is behind by its own pictures on the way, not by a queue that grows.
    assert result["slow_viewer"]["most_steps_behind"] < 10 * 3 * live_load.SLOW
    assert result["viewers"]["fast"]["pictures"] > 10 * result["viewers"]["slow"]["pictures"]
