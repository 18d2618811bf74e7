"""docs/architecture.md agrees with the code, and calls go from higher layers to lower ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.architecture import pages, tracing
from benchmarks.architecture.tracing import Call
from eventful import Config, TopR
from test_house import FLOOR_OF

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
AGAIN = "python -m benchmarks.architecture writes it anew"


def between(name: str) -> str:
    """What the script wrote between two markers of the page."""
    _, _, rest = PAGE.partition(f"<!-- {name}:begin -->\n")
    return rest.partition(f"<!-- {name}:end -->")[0].strip()


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Call]]:
    return {way: tracing.steady_frame(way) for way in pages.WAYS}


def test_the_table_of_packages_is_up_to_date():
    assert between("packages") == pages.packages_table(), AGAIN


@pytest.mark.parametrize("way", pages.WAYS)
def test_calls_go_down(traces, way):
    assert pages.unexpected(traces[way]) == []


OTHERS = {
    "exact": Config.exact(),
    "paper": Config.paper(TopR(8)),
    "block": Config(TopR(8), gating="block", max_age=16),
}


@pytest.mark.parametrize("way", pages.WAYS)
@pytest.mark.parametrize("rule", OTHERS)
def test_calls_go_down_under_other_rules(rule, way):
    calls = tracing.steady_frame(way, config=OTHERS[rule])
    assert any(call.package == "rules" for call in calls)
    assert pages.unexpected(calls) == []


def test_calls_upward_are_in_the_page():
    listed = [line.split("|")[1:3] for line in between("upward").splitlines()[2:]]
    found = [(caller.strip(" `"), file.strip(" `")) for caller, file in listed]
    assert found == [(caller, file) for caller, file, _ in pages.CALLBACKS], AGAIN


def test_a_call_upward_is_found():
    top = Call(None, "rules/gate.py", "gate", 0)
    bad = [top, Call(top, "stream.py", "Stream.call", 1)]
    assert tracing.upward(bad, FLOOR_OF) == bad[1:]
    assert pages.unexpected(bad) == ["rules/gate.py gate calls stream.py Stream.call"]


@pytest.mark.parametrize("way", pages.WAYS)
def test_the_trace_is_of_one_whole_step(traces, way):
    calls = traces[way]
    assert calls[0].function == "Stream.__call__"
    assert [call for call in calls if call.caller is None] == calls[:1]
    assert calls[0].end == len(calls)
    assert sum(call.function == "run_block" for call in calls) == 2
    executor = {"host": "engine/host.py", "device": "engine/device.py"}
    assert {call.file for call in calls} & set(executor.values()) == {executor[way]}
    assert all(len(call.inner) == 0 or call.end > call.start + 1 for call in calls)


def test_files_and_functions_named_in_the_page_exist():
    """`file.py`: `name`, `name` in the section on rules."""
    rules = PAGE.partition("## Where a rule is written")[2]
    source = ROOT / "src" / "eventful"
    pieces = [piece for row in rules.splitlines() for piece in row.split("|")[1:]]
    named = 0
    for piece in pieces:
        file = None
        for word in piece.split("`")[1::2]:
            if word.endswith(".py"):
                file = source / word
                assert file.exists(), word
            elif file is not None and word.replace(".", "").replace("_", "").isalnum():
                name = word.rpartition(".")[2]
                text = file.read_text()
                known = (f"def {name}", f"class {name}", f"{name}:", f"{name} =", f"{name}(")
                if not word.startswith("ops."):
                    assert any(form in text for form in known), (file.name, word)
                    named += 1
    assert named > 25
