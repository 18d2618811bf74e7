"""The public names, and modules that moved: a change to either is a decision."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

import eventful
from eventful._moved import MOVED, new_name

PUBLIC = [
    "Adapter",
    "Always",
    "Config",
    "EventfulError",
    "GateContext",
    "NoiseThreshold",
    "Policy",
    "SceneCut",
    "Selection",
    "StepRecord",
    "Stream",
    "StreamBatch",
    "Threshold",
    "TopFraction",
    "TopR",
    "convert",
    "inspect",
    "register_adapter",
    "register_policy",
    "repair_torchvision",
    "restore",
    "use_backend",
]


def test_the_public_names():
    assert eventful.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(eventful, name).__module__.startswith("eventful.")


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_gives_the_module_at_its_new_place(old):
    sys.modules.pop(f"eventful.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"eventful.{old} is now eventful.{MOVED[old]};"):
        found = importlib.import_module(f"eventful.{old}")
    assert found is importlib.import_module(f"eventful.{MOVED[old]}")
    assert found.__name__ == found.__spec__.name == f"eventful.{MOVED[old]}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(f"eventful.{old}") is found


def test_an_import_statement_warns_once_and_names_the_line():
    script = (
        "from eventful.data.records import Frame\n"
        "from eventful.data.records import Frame\n"
        "from eventful.paper.data.records import Frame as Same\n"
        "assert Frame is Same\n"
    )
    command = [sys.executable, "-W", "default", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "eventful.data.records is now" in line]
    assert len(told) == 1
    assert told[0].startswith("<string>:1:")


def test_other_names_are_left_alone():
    assert new_name("eventful.ops.reference") is None
    assert new_name("eventful.database") is None
    assert new_name("elsewhere.data") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("eventful.nothing")
