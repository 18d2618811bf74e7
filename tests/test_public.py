"""The public names, and modules that moved: a change to either is a decision."""

from __future__ import annotations

import dataclasses
import importlib
import math
import subprocess
import sys
import warnings

import pytest

import eventful
import zoo_timm
from clips import moving_square
from eventful import Config, Selection, TopR, policies
from eventful._moved import MOVED, new_name

PUBLIC = [
    "Adapter",
    "Always",
    "Config",
    "Context",
    "ErrorBudget",
    "EventfulError",
    "FollowScene",
    "Frame",
    "GateContext",
    "ImageTokens",
    "LatencyBudget",
    "MemoryBudget",
    "NoiseThreshold",
    "OperationsBudget",
    "Policy",
    "RateBudget",
    "SceneCut",
    "Selection",
    "Shared",
    "StepRecord",
    "Stream",
    "StreamBatch",
    "Threshold",
    "TokenChange",
    "TopFraction",
    "TopR",
    "changed_tokens",
    "convert",
    "inspect",
    "load",
    "read",
    "register_adapter",
    "register_policy",
    "repair_torchvision",
    "restore",
    "save_model",
    "stack",
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


@dataclasses.dataclass(frozen=True)
class OldPolicy:
    """Written for the first version: its parameters are called dials."""

    order: float = 2.0

    def select(self, error, context):
        raise AssertionError("its parameters serve")

    def dials(self, tokens):
        return policies.SelectionParams(-math.inf, 3, budget=True)


@dataclasses.dataclass(frozen=True)
class OwnSelect(TopR):
    """Inherits parameters that do not describe what it selects."""

    def select(self, error, context):
        return Selection.nothing(*error.shape, error.device)


def test_a_policy_with_dials_still_runs():
    with pytest.warns(DeprecationWarning, match="OldPolicy.dials is now called params"):
        assert policies.params_of(OldPolicy(), 9).cap == 3
    with pytest.warns(DeprecationWarning, match="SelectionParams"):
        assert policies.Dials is policies.SelectionParams


@pytest.mark.parametrize("devices", [set(), {"cpu"}], ids=["host", "resident"])
def test_a_select_of_its_own_is_used(devices, monkeypatch):
    monkeypatch.setattr("eventful.engine.plan.DEVICES", devices)
    assert policies.params_of(OwnSelect(5), 9) is None
    assert policies.params_of(TopR(5), 9).cap == 5
    entry = zoo_timm.ZOO["vit"]
    stream = eventful.Stream(eventful.convert(entry.make(), Config.fast()), OwnSelect(5))
    for frame in moving_square(3, entry.size):
        stream(frame)
    assert stream.last.updated == {"frame": 0.0}
