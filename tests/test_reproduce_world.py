"""`eventful reproduce`: the paper's claims on generated videos, on a small slice of them."""

# ruff: noqa: F811  (fixtures come by import)

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_models
from benchmarks.world.claims import SECTIONS
from benchmarks.world.page import PAGE, draw, section
from commands import here  # noqa: F401
from eventful.errors import CheckpointError, ConfigError
from eventful.models.shipped import weights_of
from eventful.paper import reproduce
from eventful.paper.data import open_dataset
from eventful.paper.data.kept import FRAMES, KeptFrames
from eventful.paper.data.world import Film, camera_of
from eventful.paper.evaluate import experiment as experiments
from eventful.paper.evaluate import gates
from eventful.paper.evaluate.evaluation import Settings, evaluate
from eventful.paper.evaluate.experiment import Experiment
from eventful.paper.evaluate.report import Row
from eventful.paper.evaluate.variants import Variant
from eventful.video.world import CLASSES, World

NAMES = (
    *("world-actions", "world-detection", "world-drift", "world-gate-position", "world-masks"),
    *("world-policy", "world-precision", "world-runtime", "world-spatial"),
)
TINY = "world:street?videos=2&frames=4&size=48x64&exposures=1"
DENSE = Variant("Base model", "dense")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random detector for the classes of the world, 16 tokens."""
    model = tiny_models.detector(classes=len(CLASSES))
    return tiny_models.write(model, tmp_path_factory.mktemp("tiny") / "tiny.safetensors")


def shrunk(made: Experiment) -> Experiment:
    """The same at r for 16 tokens in place of 1024."""
    small = tuple(
        v if v.r is None else replace(v, r=max(1, v.r // 64), label=f"{v.label} {v.r}")
        for v in made.variants
        if v.preset != "skip"
    )
    return replace(made, variants=small, schedule="0:8,2:1" if made.schedule else "")


# --- Names


def test_every_claim_has_a_name_a_model_and_a_section_of_the_page() -> None:
    assert experiments.world_names() == NAMES
    assert set(SECTIONS) == set(NAMES)
    for made in reproduce.experiments():
        assert made.paper
        assert made.shipped
        assert made.split == "test"
        source = reproduce.source_of(made, videos=1)
        task = {"vitdet": "detection", "vivit": "action"}[made.model]
        assert open_dataset(source, made.split).task == task
        assert f"<!-- {made.name}:begin -->" in PAGE.read_text()


def test_the_paper_s_experiments_are_listed_apart() -> None:
    assert not set(NAMES) & set(experiments.names())


def test_a_source_takes_the_extent_and_the_device_of_a_run() -> None:
    made = experiments.load("world-drift")
    text = reproduce.source_of(made, device="cuda", videos=2, frames=7)
    assert text == "world:street?videos=2&frames=7&camera=stand&device=cuda"
    clips = experiments.load("world-actions")
    assert reproduce.source_of(clips, frames=7) == clips.source
    with pytest.raises(ConfigError, match="names no generated videos"):
        reproduce.source_of(experiments.load("table-c"))


def test_the_command_lists_the_names(here) -> None:
    for words in ((), ("list",)):
        shown = here("reproduce", *words)
        assert shown.returncode == 0
        assert all(name in shown.stdout for name in NAMES)
    rows = json.loads(here("reproduce", "list", "--json").stdout)
    assert [row["name"] for row in rows] == list(NAMES)
    wrong = here("reproduce", "world-none")
    assert wrong.returncode == 2
    assert "No experiment 'world-none'" in wrong.stderr


def test_a_missing_model_is_named(here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise CheckpointError(f"The weights of {name!r} are not in this installation")

    monkeypatch.setattr(reproduce, "weights_of", missing)
    done = here("reproduce", "world-actions", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "The weights of 'actions' are not in this installation" in done.stderr
    assert not (tmp_path / "out").exists()
    done = here("reproduce", "all", "--out", tmp_path / "out")
    assert done.returncode == 0
    assert all(f"{name} is left out: The weights" in done.stderr for name in NAMES)


# --- Frames are rendered once


@pytest.fixture
def shots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The frames that are rendered from now on, with nothing kept before."""
    FRAMES.clear()
    seen: list[int] = []
    render = World.shot

    def shot(self, indices):
        seen.extend(indices)
        return render(self, indices)

    monkeypatch.setattr(World, "shot", shot)
    return seen


def test_a_second_pass_renders_nothing(shots: list[int]) -> None:
    first = [(f.pixels, f.boxes) for f in open_dataset(TINY)[0]]
    assert shots == [0, 1, 2, 3]
    again = [(f.pixels, f.boxes) for f in open_dataset(TINY)[0]]
    assert shots == [0, 1, 2, 3]
    assert all(torch.equal(a, b) and x == y for (a, x), (b, y) in zip(first, again, strict=True))
    longer = open_dataset(TINY.replace("frames=4", "frames=6"))[0]
    list(longer)
    assert shots == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="frame 5 of a video of 4"):
        open_dataset(TINY)[0].frames.read([5])


def test_frames_are_dropped_over_the_limit() -> None:
    frame = torch.zeros(3, 4, 4, dtype=torch.uint8)
    kept = KeptFrames(limit=5 * frame.nbytes)
    kept.put("a", [0, 1], [frame, frame], {0: "x"})
    kept.put("b", [0, 1], [frame, frame], {})
    assert kept.get("a", 0)[1] == "x"  # used later than b
    kept.put("c", [0, 1], [frame, frame], {})
    assert kept.get("b", 0) == (None, None)
    assert kept.get("a", 1)[0] is not None
    assert kept.bytes == len(kept) * frame.nbytes == 4 * frame.nbytes
    kept.put("d", range(9), [frame] * 9, {})
    assert len(kept) == 5  # a video larger than the limit is kept in part


# --- Small runs of every kind


def test_groups_are_the_videos_of_each_camera(tiny: Path, tmp_path: Path) -> None:
    made = replace(shrunk(experiments.load("world-detection")), metric="fgfa_map50")
    made = replace(made, variants=(DENSE, replace(made.variants[1], label="paper")))
    report = evaluate(made, Settings(TINY, {"base": tiny}, out=tmp_path))
    assert list(report.groups) == ["stand", "hand"]
    for rows in report.groups.values():
        assert [row.label for row in rows] == ["Base model", "paper"]
        assert [row.frames for row in rows] == [4, 4]
    mean = sum(rows[1].operations for rows in report.groups.values()) / 2
    assert mean == pytest.approx(report.rows[1].operations)
    table = list(csv.DictReader((tmp_path / "groups.csv").open()))
    assert [row["camera"] for row in table] == ["stand", "stand", "hand", "hand"]
    assert table[0]["device_name"]
    assert table[0]["torch"]
    assert (tmp_path / "groups.png").stat().st_size > 1000
    assert [camera_of(video) for video in open_dataset(TINY)] == ["stand", "hand"]
    (tmp_path / "groups.png").unlink()
    draw(tmp_path, "world-detection")  # as for a run on a machine without matplotlib
    assert (tmp_path / "groups.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["world-runtime", "world-drift"])
def test_a_trace_follows_every_frame(name: str, tiny: Path, tmp_path: Path) -> None:
    made = shrunk(experiments.load(name))
    settings = Settings(TINY, {"base": tiny}, out=tmp_path, frames=4)
    report = reproduce.measure(made, settings)
    steps = list(csv.DictReader((tmp_path / "trace.csv").open()))
    assert len(steps) == len(made.variants) * 2 * 4
    assert {row["frame"] for row in steps} == set("0123")
    assert all(float(row["error"]) < 1e-4 for row in steps if row["frame"] == "0")
    assert len(report.to_dict()["parts"]) == len(made.variants) * (2 if made.schedule else 4)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    if made.schedule:
        costs = [float(r["operations"]) for r in steps[:4]]
        assert costs[0] > costs[1] > costs[2] == costs[3]
        assert [r["budget"] for r in steps[:4]] == ["r = 8", "r = 8", "r = 1", "r = 1"]
    again = reproduce.measure(made, settings)  # resumed
    assert again.to_dict()["rows"] == report.to_dict()["rows"]


def test_masks_say_where_updates_lie(tiny: Path, tmp_path: Path) -> None:
    made = shrunk(experiments.load("world-masks"))
    report = reproduce.measure(made, Settings(TINY, {"base": tiny}, out=tmp_path))
    rows = list(csv.DictReader((tmp_path / "masks.csv").open()))
    assert len(rows) == 8
    assert [row["flush"] for row in rows[:4]] == ["1", "0", "0", "0"]
    assert 0 <= report.statistics["objects"] <= 1
    assert (tmp_path / "figure.png").is_file()


def test_thresholds_are_tuned_for_each_gate(tiny: Path) -> None:
    variant = Variant("gates", "paper", per_gate=0.25)
    made = Experiment("mine", "mine", (DENSE, variant))
    report = evaluate(made, Settings(TINY, {"base": tiny}))
    found = report.settings["variants"][variant.key]["gates"]
    assert len(found) > 4
    assert len(set(found.values())) > 4
    assert report.rows[1].operations < report.rows[0].operations
    wrong = Experiment("mine", "mine", (Variant("gates", "fast", per_gate=0.25),))
    with pytest.raises(ConfigError, match="a gate around every operator"):
        evaluate(wrong, Settings(TINY, {"base": tiny}))


def test_tuned_thresholds_are_kept_with_the_results(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each video is stored: a run that is resumed repeats none, or the one that is missing."""
    tuned: list[str] = []
    inner = gates.GateJob.run

    def run(job, video, device, tick):
        tuned.append(video.name)
        return inner(job, video, device, tick)

    monkeypatch.setattr(gates.GateJob, "run", run)
    made = Experiment("mine", "mine", (Variant("gates", "paper", per_gate=0.25),))
    settings = Settings(TINY, {"base": tiny}, out=tmp_path)
    first = evaluate(made, settings).to_dict()
    known = (tmp_path / "run.json").read_bytes()
    assert len(tuned) == len(set(tuned)) > 1
    kept = sorted((tmp_path / "videos" / "gates-of-gates-gates0.25").iterdir())
    assert len(kept) == len(tuned)
    before = [path.read_bytes() for path in kept]
    assert evaluate(made, settings).to_dict()["rows"] == first["rows"]
    assert len(tuned) == len(kept)
    kept[1].unlink()
    again = evaluate(made, settings).to_dict()
    assert tuned[len(kept) :] == [tuned[1]]
    assert [path.read_bytes() for path in kept] == before
    assert again["settings"] == first["settings"]
    assert (tmp_path / "run.json").read_bytes() == known


def test_without_the_coco_library_the_other_score_is_used(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    report = evaluate(Experiment("mine", "mine", (DENSE,)), Settings(TINY, {"base": tiny}))
    assert report.rows[0].coco_map50 is None
    assert report.rows[0].fgfa_map50 is not None
    assert report.experiment.metric == "fgfa_map50"
    assert "eventful-transformers[eval]" in report.left_out["coco_map50"]


def test_results_are_kept_where_figures_cannot_be_drawn(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = Experiment("mine", "mine", (DENSE,))
    with pytest.warns(UserWarning, match="No figures"):
        evaluate(made, Settings(TINY, {"base": tiny}, out=tmp_path))
    assert (tmp_path / "results.csv").is_file()
    assert not (tmp_path / "figure.png").exists()


def test_clips_of_actions_run_without_tuned_weights(tmp_path: Path) -> None:
    weights = tiny_models.write(tiny_models.recogniser(classes=16), tmp_path / "vivit.safetensors")
    made = experiments.load("world-actions")
    few = tuple(replace(v, r=v.r and 4) for v in made.variants if v.r in (None, 50))
    size = "world:actions?videos=3&size=32x32&exposures=1"
    settings = Settings(size, {"base": weights}, views=(1, 1))
    report = evaluate(replace(made, variants=few), settings)
    assert [row.label for row in report.rows] == ["Base model", "Not tuned"]
    assert "needs --weights r50=FILE" in report.left_out.values()
    assert list(report.groups) == ["stand", "hand", "pan"]


# --- The shipped detector


def measured(source: str, folder: Path) -> dict[str, Row]:
    """Some rows of world-detection, of the shipped detector, by key."""
    made = experiments.load("world-detection")
    wanted = {"base-model", "paper-r64", "exact-r64", "default"}
    made = replace(made, variants=tuple(v for v in made.variants if v.key in wanted))
    given = {"base": weights_of("detector")}
    return {
        row.key: row for row in evaluate(made, Settings(source, given, "test", out=folder)).rows
    }


@pytest.fixture(scope="module")
def few_frames(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """Every camera, six frames each: the default differs from dense by up to five points here."""
    return measured("world:street?videos=5&frames=6&exposures=1", tmp_path_factory.mktemp("few"))


def test_the_detector_finds_objects(few_frames: dict[str, Row]) -> None:
    assert few_frames["base-model"].fgfa_map50 >= 80


def test_the_default_is_nearly_as_good_as_dense(few_frames: dict[str, Row]) -> None:
    assert few_frames["default"].fgfa_map50 >= few_frames["base-model"].fgfa_map50 - 5
    assert few_frames["default"].operations < few_frames["base-model"].operations


def test_attention_on_the_buffers_is_better_than_the_paper_s(few_frames: dict[str, Row]) -> None:
    assert few_frames["paper-r64"].fgfa_map50 < few_frames["exact-r64"].fgfa_map50


@pytest.mark.slow
def test_the_same_on_more_frames(tmp_path: Path) -> None:
    rows = measured("world:street?videos=5&frames=14&exposures=1", tmp_path)
    scores = {key: row.fgfa_map50 for key, row in rows.items()}
    assert scores["base-model"] >= 80
    assert scores["default"] >= scores["base-model"] - 3
    assert scores["paper-r64"] < scores["exact-r64"]


# --- The page


def test_the_page_is_what_the_stored_results_give() -> None:
    page = PAGE.read_text()
    for name in NAMES:
        _, _, rest = page.partition(f"<!-- {name}:begin -->")
        text, _, _ = rest.partition(f"<!-- {name}:end -->")
        assert text.strip() == section(name).strip(), f"run: python -m benchmarks.world ({name})"


def test_films_are_sent_to_workers_without_their_frames() -> None:
    film = open_dataset(TINY)[0].frames
    assert isinstance(film, Film)
    list(film)
    assert set(film.__getstate__()) == {
        *("seed", "frames", "camera", "size", "device", "exposures", "action"),
    }
