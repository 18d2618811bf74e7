"""Times of the paper's systems: what is timed, and that the ratios belong to one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny_models
from eventful import Config, TopR
from eventful.cli.app import app
from eventful.errors import ConfigError
from eventful.paper.evaluate import experiment as experiments
from eventful.paper.evaluate.variants import Variant

pytestmark = pytest.mark.usefixtures("without_openvino")

SMALL = """
title = "Small runtimes"
kind = "runtime"

[[variants]]
label = "Base model"
preset = "dense"
size = 64
published = { gpu_ms = 1.0, cpu_ms = 2.0 }

[[variants]]
label = "Spatial"
preset = "dense"
size = 64
options = { pool = 2 }

[[variants]]
label = "Temporal"
preset = "paper"
r = 4
size = 64

[[variants]]
label = "Base model"
preset = "dense"
model = "vivit"
size = 32

[[variants]]
label = "fast"
preset = "fast"
model = "vivit"
size = 32
r = 1
"""


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("weights")
    detector = tiny_models.write(tiny_models.detector(), folder / "vitdet.safetensors")
    recogniser = tiny_models.write(tiny_models.recogniser(), folder / "vivit.safetensors")
    return ["--weights", f"base={detector}", "--weights", f"vivit={recogniser}"]


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def timed(experiment: str, *arguments: str) -> dict[str, dict[str, float]]:
    command = ["bench", "runtime", experiment, "--no-compile", "--frames", "3", "--json"]
    report = json.loads(invoke(*command, *arguments))
    assert "bf16" in next(iter(report["detail"]["dense_paths"].values()))
    return {row["label"]: row for row in report["rows"]}


def test_a_detector_is_timed_with_and_without_its_heads(
    experiment: str, weights: list[str], tmp_path: Path
) -> None:
    rows = timed(experiment, *weights, "--model", "vitdet", "--out", str(tmp_path / "out"))
    (fastest,) = (label for label in rows if label.startswith("Base model, "))
    assert set(rows) == {"Base model", "Spatial", "Temporal", fastest}
    for row in rows.values():
        assert min(row[name] for name in ("ms", "total_ms", "first_ms", "first_total_ms")) > 0
        assert row["frames"] == 3
    # Each is timed in a stream of its own, so a single row may be off.
    backbones, wholes = (sum(row[name] for row in rows.values()) for name in ("ms", "total_ms"))
    assert backbones < wholes
    base, spatial, temporal = (rows[name] for name in ("Base model", "Spatial", "Temporal"))
    assert rows[fastest]["speedup"] == rows[fastest]["total_speedup"] == 1
    assert base["base_speedup"] == 1
    assert base["published_cpu_ms"] == 2.0
    assert base["operations"] == base["dense_operations"] == rows[fastest]["operations"]
    assert spatial["operations"] < base["operations"]
    assert temporal["operations"] < base["operations"]
    stored = json.loads((tmp_path / "out/results.json").read_text())
    assert [row["label"] for row in stored["rows"]] == list(rows)
    assert stored["origin"]["torch"]


def test_a_recogniser_is_timed_a_video_with_its_views_together(
    experiment: str, weights: list[str]
) -> None:
    rows = timed(experiment, *weights, "--model", "vivit", "--views", "1x2")
    base, fast = rows["Base model"], rows["fast"]
    for row in rows.values():
        assert 0 < row["first_ms"] <= row["ms"] < row["total_ms"]
    assert base["operations"] == base["dense_operations"]
    assert base["operations"] / 16 < fast["operations"] < base["operations"]  # one flush in 16
    again = timed(experiment, *weights, "--model", "vivit", "--views", "1x1")
    assert again["fast"]["operations"] == pytest.approx(fast["operations"] / 2)


def test_what_cannot_be_timed_is_refused(experiment: str) -> None:
    for arguments, message in (
        (("table-1",), "evaluate run table-1"),
        ((experiment, "--size", "48"), "vitdet at 64"),
        ((experiment, "--views", "4"), "temporal x spatial"),
    ):
        with pytest.raises(ConfigError, match=message):
            invoke("bench", "runtime", *arguments)


def test_the_table_prints(experiment: str, weights: list[str]) -> None:
    command = ["bench", "runtime", experiment, "--no-compile", "--frames", "1", "--views", "1x1"]
    shown = invoke(*command, *weights)
    assert "total" in shown
    assert "Temporal" in shown


def test_a_file_switches_a_part_of_a_preset_off() -> None:
    """TOML has no null."""
    made = Config.from_toml('preset = "fast"\ncontext = false\nscene_cut = false\n')
    assert made == Config.fast(context=None, scene_cut=None)
    assert made != Config.fast()
    assert Variant("bare", "fast", r=4, options={"context": False}).config() == Config.fast(
        TopR(4), context=None, fallback=False
    )


def test_packaged_systems_are_known() -> None:
    """Every variant of the packaged file can be built."""
    made = experiments.load("systems")
    assert {variant.model for variant in made.variants} == {"vitdet", "vivit"}
    assert sum(variant.r is None and variant.preset == "fast" for variant in made.variants) == 2
