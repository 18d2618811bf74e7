"""`eventful calibrate --ray`: the numbers of one process, and what a run that stopped keeps."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import miniatures
import zoo_timm
from commands import here  # noqa: F401
from eventful import Config, TopFraction
from eventful.bench.video.footage import open_footage
from eventful.bench.video.measure import Head, VideoPlan
from eventful.bench.video.model import Backbone
from eventful.calibrate import spread
from eventful.calibrate import thresholds as tuning
from eventful.calibrate.measure import Clip, load_clip, measure
from eventful.calibrate.rows import rows_of
from eventful.calibrate.settings import Setting, skipping
from eventful.calibrate.spread import Spread
from eventful.calibrate.thresholds import TunedHere, tuned_settings
from eventful.cli import calibrate_ray
from eventful.errors import WorkerError
from eventful.models.vitdet.frames import Detections
from eventful.paper.evaluate.runs import RunStore
from eventful.paper.evaluate.workers import Workers
from eventful.remote.session import ray_session

SIZE = "48x80"
SETTINGS = [
    Setting("TopFraction(0.2)", Config.fast(TopFraction(0.2))),
    Setting("default", Config.fast()),
    skipping(3),
]
COMMAND = ("calibrate", "test_vit", "stress:enter", "stress:walk", "--size", SIZE, "--frames", "8")
COMMAND += ("--setting", "TopFraction(0.2)", "--setting", "skip:3", "--no-time", "--error", "5")
ON_RAY = ("--ray", "--workers", "1", "--threads", "1")


def plan() -> VideoPlan:
    torch.manual_seed(0)
    return VideoPlan(Backbone("tiny", zoo_timm.plain(img_size=(48, 80))()), SIZE, timed=False)


@dataclass(frozen=True)
class Opened:
    """A clip with a head that finds one box where the tokens are largest."""

    name: str
    frames: int = 8
    head: bool = False

    def __call__(self, device: str) -> Clip:
        head = Head(_detect, lambda found, _: sum(float(one.scores.sum()) for one in found))
        return load_clip(
            plan(),
            open_footage(f"stress:{self.name}", self.frames, SIZE),
            head if self.head else None,
        )


def _detect(tokens: torch.Tensor, size: tuple[int, int]) -> Detections:
    scores = tokens.float().mean(dim=2)[0].topk(2).values
    boxes = torch.arange(8.0).reshape(2, 4)
    return Detections(boxes, scores, torch.zeros(2, dtype=torch.long))


def spread_of(openers: list[Opened], folder: Path) -> Spread:
    clips = [opener("cpu") for opener in openers]
    return Spread(clips, openers, RunStore.open(folder, {}, resume=True), Workers())


@pytest.mark.parametrize("head", [False, True])
def test_items_give_the_samples_of_one_process(tmp_path: Path, head: bool) -> None:
    """In the order of clips and settings; rows are equal to the last bit."""
    openers = [Opened("enter", head=head), Opened("walk", 9)]
    here = spread_of(openers, tmp_path)
    found, alone = here.measure(SETTINGS), measure(plan(), here.clips, SETTINGS)
    for one, other in zip(found.frames, alone.frames, strict=True):
        for a, b in zip(one, other, strict=True):
            assert list(a.settings) == list(b.settings)
            for name, sample in a.settings.items():
                assert (sample.updated, sample.operations, sample.error) == (
                    b.settings[name].updated,
                    b.settings[name].operations,
                    b.settings[name].error,
                )
    assert rows_of(found) == rows_of(alone)
    assert (rows_of(found)[0].map50 is not None) == head


def test_thresholds_are_those_of_one_process(tmp_path: Path) -> None:
    here = spread_of([Opened("walk"), Opened("enter")], tmp_path)
    found = tuned_settings(here, "paper", shares=(0.3,))
    assert found == tuned_settings(TunedHere(here.clips), "paper", shares=(0.3,))


def test_a_run_that_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    inner = spread.SampleJob.tensors

    def tensors(job: Any, *args: Any) -> Any:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(job.setting.name)
        return inner(job, *args)

    openers = [Opened("enter"), Opened("walk")]
    monkeypatch.setattr(spread.SampleJob, "tensors", tensors)
    with pytest.raises(KeyboardInterrupt):
        spread_of(openers, tmp_path).measure(SETTINGS)
    assert ran == ["TopFraction(0.2)", "default"]
    ran.append("stopped")
    found = spread_of(openers, tmp_path).measure(SETTINGS)
    assert ran[3:] == ["skip:3", *(setting.name for setting in SETTINGS)]
    whole = spread_of(openers, tmp_path / "whole").measure(SETTINGS)
    assert rows_of(found) == rows_of(whole)
    count = len(ran)
    spread_of(openers, tmp_path).measure(SETTINGS[:2])  # fewer settings: all are there
    assert len(ran) == count


def test_a_worker_with_another_clip_is_refused(tmp_path: Path) -> None:
    opened = Opened("enter")
    other = Spread(
        [opened("cpu")], [Opened("walk")], RunStore.open(tmp_path, {}, resume=True), Workers()
    )
    with pytest.raises(WorkerError, match="reads other pixels or weights"):
        other.measure(SETTINGS)


def test_times_are_refused(here: Callable[..., Any]) -> None:
    done = here(*(word for word in COMMAND if word != "--no-time"), *ON_RAY)
    assert done.returncode == 2
    assert "--ray measures no times" in " ".join(done.stderr.split())


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process in place of those of Ray."""
    monkeypatch.setattr(calibrate_ray, "RayWorkers", lambda *_: Workers())


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("more", [(), ("--preset", "paper", "--per-gate")], ids=["", "per-gate"])
def test_the_command_gives_what_one_process_gives(
    here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(tuning, "SHARES", (0.4,))
    monkeypatch.setattr(tuning, "_TRIES", 2)
    out = tmp_path / "out"
    alone = here(*COMMAND, *more, "--json")
    assert alone.returncode == 0, alone.stderr
    for _ in range(2):  # the second time from what is kept
        done = here(*COMMAND, *more, *ON_RAY, "--json", "--out", out)
        assert done.returncode == 0, done.stderr
        assert same(done.stdout) == same(alone.stdout)
    (folder,) = (out / "samples").iterdir()
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    here(*COMMAND[:-1], "4", *more, *ON_RAY, "--out", out)  # another limit needs nothing new
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == kept


def same(text: str) -> dict[str, Any]:
    """A report without the date."""
    data = miniatures.strict_json(text)
    del data["origin"]
    return data


@pytest.fixture
def ray() -> Iterator[Any]:
    with ray_session(cpus=2) as module:
        yield module


@pytest.mark.slow
def test_two_workers_of_ray_give_what_one_process_gives(
    here: Callable[..., Any], ray: Any, tmp_path: Path
) -> None:
    alone = here(*COMMAND, "--json")
    done = here(*COMMAND, "--ray", "--workers", "2", "--threads", "1", "--json", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(done.stdout) == same(alone.stdout)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4
