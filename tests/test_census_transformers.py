"""Classes of transformers: each converts and equals its dense model, or is refused and says why."""

from __future__ import annotations

import re

import pytest
import torch

import eventful
import usual_transformers
from census import PAGE, Case, judged, table, written
from census_transformers import CASES, rf_detr
from eventful.ops import WindowGrid
from eventful.surgery.conversion import find_session, needs_host

# What the zoos do not have: a structure by another name, clips, other outputs, and refusals.
QUICK = {
    "OwlViTForObjectDetection",
    "VitPoseForPoseEstimation",
    "VideoMAEModel",
    "VJEPA2Model",
    "ASTModel",
    "ViTMAEModel",
    "Sam2VisionModel",
    "GroundingDinoForObjectDetection",
}
COUNTED = [case for case in CASES if not case.wraps]
KEPT = written(PAGE.read_text(), "transformers")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=f"{case.name}-{place}", marks=[] if case.name in QUICK else [pytest.mark.slow]
        )
        for place, case in enumerate(CASES)
    ],
)
def test_a_class_is_as_the_docs_say(case: Case) -> None:
    row = judged(case)
    lines = table([row], [case]).splitlines()
    assert any(f"`{case.name}`" in line and line in KEPT for line in lines), row


def test_the_list_is_long_enough() -> None:
    assert len({case.name for case in COUNTED}) == len(COUNTED) >= 82
    found = re.match(r"(\d+) of (\d+) classes convert", KEPT)
    assert found is not None
    assert int(found[2]) == len(COUNTED)
    assert int(found[1]) >= 60
    assert all(f"`{case.name}`" in KEPT for case in CASES)


def test_refusals_name_a_part() -> None:
    """A module's class and what it does, and no message of a library."""
    refused = re.search(r"\| refused \| because \|\n(.*?)\n\n", KEPT, re.DOTALL)
    assert refused is not None
    for line in refused[1].splitlines()[1:]:
        assert re.match(r"\| `\w+` \| \w+: it", line), line
        assert "Error" not in line


@pytest.mark.slow
def test_the_state_at_usual_sizes_is_as_the_docs_say() -> None:
    assert usual_transformers.table() == written(PAGE.read_text(), "transformers-state")


def test_wide_windows_have_no_kernel_and_say_so() -> None:
    """A kernel for a GPU holds a row of a window at once."""
    session = find_session(eventful.convert(rf_detr()))
    assert session is not None
    ((name, (trunk, adapter)),) = session.trunks.items()
    assert needs_host(session, {name: adapter.layout(trunk, (64, 64))}) is None
    assert "128 tokens" in str(needs_host(session, {name: adapter.layout(trunk, (256, 256))}))
    ways = [eventful.inspect(rf_detr(), side).on_gpu["fast"] for side in (64, 256)]
    assert ways == ["resident", "host"]
    pytest.importorskip("triton")
    from eventful.ops import triton

    q = torch.empty(1, 1, 1, 16)
    for width, reason in ((128, None), (129, "128 tokens")):
        found = triton._attend_windows(q, q, q, 1.0, WindowGrid((4, width), (1, width)))
        assert reason in found if reason else found is None
