"""The tables of docs/cluster.md are those of the stored runs, and the runs are sound."""

from __future__ import annotations

import json

import pytest

from benchmarks.cluster.page import BEGIN, END, PAGE, RESULTS, tables

# The simulation is no run; tests/test_cluster_simulate.py is about it.
STORED = sorted({path.stem for path in RESULTS.glob("*.json")} - {"simulation"})


def test_the_page_shows_the_stored_runs():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == tables(), "run: python -m benchmarks.cluster, or its write_page()"


@pytest.mark.parametrize("name", STORED)
def test_a_stored_run_counted_nothing_twice(name):
    run = json.loads((RESULTS / f"{name}.json").read_text())
    assert run["origin"]["commit"]
    if "audit" in run:
        audit = run["audit"]
        assert run["sound"]
        assert audit["counted"] + sum(audit["missed"].values()) == audit["frames"]
        assert audit["repeated"] == audit["unexplained"] == 0


def test_memory_of_the_soak_is_bounded():
    samples = json.loads((RESULTS / "soak.json").read_text())["samples"]
    half = samples[len(samples) // 3 :]
    for kind in ("driver", "registry", "readers", "workers", "ray"):
        assert half[-1][kind] <= 1.05 * half[0][kind] + 5, kind
