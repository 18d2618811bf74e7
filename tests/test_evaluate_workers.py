"""The processes of an evaluation, and the store they write to."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from evaluation_data import vid, vivit, weights  # noqa: F401
from eventful.errors import (
    CheckpointError,
    RunError,
    WorkerError,
)
from eventful.paper.data import open_dataset
from eventful.paper.evaluate import workers
from eventful.paper.evaluate.detection import DetectionJob
from eventful.paper.evaluate.models import Weights
from eventful.paper.evaluate.runs import RunStore, VideoResult
from eventful.paper.evaluate.variants import Variant
from eventful.paper.evaluate.workers import Item, Workers
from miniatures import damaged  # noqa: F401


def test_a_worker_reports_progress_problems_and_errors(
    damaged: Path, weights: Path, vivit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos = open_dataset(damaged, "val").videos
    store = RunStore.open(tmp_path / "run", {}, resume=True)
    variant = Variant("Base model", "dense")
    good, wrong_model = (DetectionJob(Weights(path), variant) for path in (weights, vivit))
    messages = queue.SimpleQueue()
    monkeypatch.setattr(workers, "_worker", workers._Worker("cpu", messages))
    assert workers._run_item(Item(good, store, "v", 0, videos[0])) is None
    assert "000001.JPEG" in workers._run_item(Item(good, store, "v", 1, videos[1]))
    with pytest.raises(CheckpointError, match=videos[0].name):
        workers._run_item(Item(wrong_model, store, "v", 2, videos[0]))
    with pytest.raises(WorkerError, match="stumbled"):
        workers._run_item(Item(Stumbling(), store, "v", 3, videos[0]))
    sent = [messages.get() for _ in range(messages.qsize())]
    assert {message.worker for message in sent} == {os.getpid()}
    names = [message.began for message in sent if message.began is not None]
    assert names == [videos[0].name, videos[1].name, videos[0].name, videos[0].name]
    assert sum(message.frames for message in sent) == 2


class Stumbling:
    """A job that raises an unexpected error."""

    def run(self, video: object, device: str, tick: object) -> VideoResult:
        raise ZeroDivisionError("stumbled")


class Dying(Stumbling):
    """A job that takes its process with it, as one that runs out of memory does."""

    def run(self, video: object, device: str, tick: object) -> VideoResult:
        os._exit(9)


def run_in_two_processes(job: Stumbling, data: Path, folder: Path) -> None:
    store = RunStore.open(folder, {}, resume=True)
    videos = open_dataset(data, "val").videos
    with Workers(2, threads=1) as pool:
        pool.run([Item(job, store, "v", i, video) for i, video in enumerate(videos)])


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run(vid: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="exit code 9 at ILSVRC2015_val"):
        run_in_two_processes(Dying(), vid, tmp_path)


@pytest.mark.slow
def test_errors_of_a_worker_process_name_the_video(vid: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"Video ILSVRC2015_val_\d+ failed(.|\n)*stumbled"):
        run_in_two_processes(Stumbling(), vid, tmp_path)


STOPPED = """
import os, signal, sys, time
from pathlib import Path
from eventful.paper.data.records import Video
from eventful.paper.evaluate.runs import RunStore
from eventful.paper.evaluate.workers import Item, Workers
from eventful.video.source import ImageFiles

class Slow:
    def run(self, video, device, tick):
        tick(1)
        time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if started in the background
    store = RunStore.open(sys.argv[1], {}, resume=True)
    frames = ImageFiles(Path(), ("x" * 100_000,))  # more than a pipe holds
    items = [Item(Slow(), store, "v", i, Video("v", frames)) for i in range(8)]

    def stop(frames):
        Path(sys.argv[2]).touch()
        os.killpg(0, signal.SIGINT)

    with Workers(2, threads=1) as workers:
        workers.run(items, stop)
"""


def test_ctrl_c_ends_every_process_at_once(tmp_path: Path) -> None:
    """As a terminal sends it, to all of them; videos still wait to be handed out."""
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), str(tmp_path / "pressed")],
        capture_output=True,
        text=True,
        timeout=300,  # three processes that load torch, on a machine that may be busy
        start_new_session=True,
    )
    took = time.time() - (tmp_path / "pressed").stat().st_mtime
    assert took < 300  # a worker's job would go on for ten minutes
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("Traceback") == 1  # of the calling process alone
    assert not list(tmp_path.rglob("*.partial"))


def test_a_mistake_names_the_video(vid: Path, tmp_path: Path) -> None:
    store = RunStore.open(tmp_path, {}, resume=True)
    video = open_dataset(vid, "val").videos[1]
    with pytest.raises(WorkerError, match=rf"Video {video.name} failed(.|\n)*stumbled"):
        Workers(1).run([Item(Stumbling(), store, "v", 0, video)])


def test_a_store_refuses_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    with pytest.raises(RunError, match="not a run's folder"):
        RunStore.open(tmp_path, {}, resume=True)
    with pytest.raises(RunError, match=r"cannot be written to.*--out"):
        RunStore.open(Path(__file__) / "run", {}, resume=True)
    (tmp_path / "run.json").write_text("not json")
    with pytest.raises(RunError, match="start over"):
        RunStore.open(tmp_path, {}, resume=True)


def test_a_store_keeps_numbers_exactly(tmp_path: Path) -> None:
    store = RunStore.open(tmp_path / "run", {"a": (1, 2)}, resume=True)
    kept = torch.rand(3, 4, dtype=torch.float64)
    store.save("v", 7, "P01/a b", VideoResult({"x": kept, "none": torch.zeros(0, 4)}, {"n": 1}))
    found = RunStore.open(tmp_path / "run", {"a": [1, 2]}, resume=True).load("v", 7, "P01/a b")
    assert found.tensors["x"].equal(kept)
    assert found.tensors["none"].shape == (0, 4)
    assert found.facts == {"n": 1}
