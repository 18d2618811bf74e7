"""An evaluation on Ray: the numbers of one process, also after processes were killed."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import miniatures
from evaluation_data import weights  # noqa: F401
from eventful import extras
from eventful.cli import main
from eventful.errors import (
    ClusterError,
    DamagedMediaError,
    MissingDependencyError,
    MissingFileError,
    WorkerError,
)
from eventful.paper.data import open_dataset
from eventful.paper.evaluate import ray_workers
from eventful.paper.evaluate.evaluation import Settings, evaluate
from eventful.paper.evaluate.experiment import Experiment
from eventful.paper.evaluate.ray_workers import Actor, Place, RayWorkers
from eventful.paper.evaluate.runs import RunStore, VideoResult
from eventful.paper.evaluate.variants import Variant
from eventful.paper.evaluate.workers import Item, Workers
from eventful.remote import session
from eventful.remote.ports import Listening
from eventful.remote.session import ray_session


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet VID: six videos, long enough to be killed in."""
    folder = tmp_path_factory.mktemp("vid")
    return miniatures.imagenet(folder, frames=12, videos=8)


def command(data: Path, weights: Path, out: Path, *more: str) -> list[str]:
    return [
        *("evaluate", "vitdet", "--data", str(data), "--weights", str(weights), "--json"),
        *("--preset", "dense", "--preset", "paper", "--r", "8", "--threads", "1"),
        *("--out", str(out), *more),
    ]


def rows(text: str) -> list[dict[str, Any]]:
    return json.loads(text)["rows"]


@pytest.fixture(scope="module")
def alone(data: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The rows of one process, without Ray."""
    out = tmp_path_factory.mktemp("alone")
    done = subprocess.run(
        [sys.executable, "-m", "eventful.cli", *command(data, weights, out)],
        capture_output=True,
        text=True,
        check=True,
    )
    return rows(done.stdout)


# `eventful` that stops after so many results as the file says whose name comes first.
HELD = """
import sys, time
from pathlib import Path
from eventful.cli import main
from eventful.paper.evaluate.runs import RunStore

limit, save = Path(sys.argv.pop(1)), RunStore.save

def save_and_wait(self, *args):
    save(self, *args)
    while len(list(self.folder.rglob("*.safetensors"))) >= int(limit.read_text()):
        time.sleep(0.01)

RunStore.save = save_and_wait
main()
"""


class Driver:
    """`eventful evaluate --ray` in a process of its own, which waits after `limit` results."""

    def __init__(self, data: Path, weights: Path, out: Path, limit: int = 10**6) -> None:
        self.out = out
        self._limit = out.with_name(f"{out.name}-limit")
        self.hold(limit)
        arguments = command(data, weights, out, "--ray", "--workers", "2")
        self.process = subprocess.Popen(
            [sys.executable, "-c", HELD, str(self._limit), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stored(self) -> dict[str, tuple[int, int]]:
        """Files of results, with what changes when one is written again."""
        found = self.out.rglob("*.safetensors")
        return {
            str(path.relative_to(self.out)): (path.stat().st_ino, path.stat().st_mtime_ns)
            for path in found
        }

    def hold(self, limit: int) -> None:
        """Go on until there are so many results."""
        new = self._limit.with_suffix(".new")
        new.write_text(str(limit))
        new.replace(self._limit)

    def wait_for(self, what: Callable[[], Any]) -> Any:
        end = time.monotonic() + 400
        while time.monotonic() < end:
            assert self.process.poll() is None, self.process.communicate()
            if found := what():
                return found
            time.sleep(0.02)
        raise AssertionError("nothing happened")

    def actors(self) -> list[int]:
        """Processes of Ray that compute."""
        return [pid for pid, name in descendants(self.process.pid) if name.startswith("ray::Act")]

    def finish(self) -> list[Any]:
        out, err = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, err
        return rows(out)


def descendants(root: int) -> Iterator[tuple[int, str]]:
    """Process ids below one, with their titles."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                titles[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    for pid in parents:
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root:
            yield pid, titles[pid]


@pytest.mark.slow
def test_ray_gives_the_rows_of_one_process_and_listens_on_loopback_only(
    data: Path, weights: Path, tmp_path: Path, alone: list[Any]
) -> None:
    driver = Driver(data, weights, tmp_path / "run", limit=1)
    driver.wait_for(driver.stored)  # and now it waits
    processes = list(descendants(driver.process.pid))
    listening = addresses({pid for pid, _ in processes})
    assert listening  # of gcs_server, raylet and actors
    assert all(address.startswith("127.") for address in listening), listening
    heads = {pid for pid, title in processes if "dashboard/dashboard.py" in title}
    assert not addresses(heads)  # it runs without its page
    driver.hold(10**6)
    assert driver.finish() == alone


def addresses(pids: set[int]) -> set[str]:
    """Addresses on which processes listen, from /proc."""
    sockets: set[str] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                name = os.readlink(link)
            except OSError:
                continue
            if name.startswith("socket:["):
                sockets.add(name[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                if len(words) == 16 and words[:12] == bytes(10) + b"\xff\xff":
                    words = words[12:]
                family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
                found.add(socket.inet_ntop(family, words))
    return found


@pytest.mark.slow
def test_killed_workers_and_drivers_lose_nothing_that_was_done(
    data: Path, weights: Path, tmp_path: Path, alone: list[Any]
) -> None:
    first = Driver(data, weights, tmp_path / "run", limit=1)
    first.wait_for(first.stored)
    os.kill(first.actors()[0], signal.SIGKILL)
    first.hold(4)
    first.wait_for(lambda: len(first.stored()) == 4)  # it went on with another worker
    first.process.kill()
    first.process.wait()
    done = first.stored()
    assert len(done) == 4
    second = Driver(data, weights, tmp_path / "run")
    assert second.finish() == alone
    after = second.stored()
    assert len(after) == 16
    assert {name: after[name] for name in done} == done  # none was written again


class Fixed:
    """A job whose result is the number of frames of a video."""

    def length(self, video: Any) -> int:
        return len(video)

    def run(self, video: Any, device: str, tick: Any) -> VideoResult:
        done = 0
        for _ in video:
            done += 1
            tick(1)
        return VideoResult({"frames": torch.tensor([done])}, {"name": video.name})


class Deadly(Fixed):
    """A job that takes its process with it."""

    def run(self, video: Any, device: str, tick: Any) -> VideoResult:
        os._exit(9)


class Astray(Fixed):
    """A job on a machine that does not have the data."""

    def run(self, video: Any, device: str, tick: Any) -> VideoResult:
        raise MissingFileError("No file here.")


class Confused(Fixed):
    """A job that raises an error of ours."""

    def run(self, video: Any, device: str, tick: Any) -> VideoResult:
        raise ClusterError("confused")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # for the jobs of this file
        with ray_session(cpus=1) as module:
            yield module


def items(job: Any, data: Path, folder: Path) -> list[Item]:
    store = RunStore.open(folder, {}, resume=True)
    videos = open_dataset(data, "val").videos[:2]
    return [Item(job, store, "v", i, video) for i, video in enumerate(videos)]


def test_actors_give_what_one_process_gives(ray: Any, data: Path, tmp_path: Path) -> None:
    """Also: progress adds up, a data problem that this machine does not have is no problem."""
    done: list[int] = []
    with RayWorkers(count=1, threads=1) as workers:
        assert workers.run(items(Fixed(), data, tmp_path / "ray"), done.append) == {}
        assert workers.run([], done.append) == {}
        with pytest.raises(WorkerError, match="this machine can"):
            workers.run(items(Astray(), data, tmp_path / "astray"))
    assert sum(done) == 24
    with Workers(1, threads=1) as workers:
        workers.run(items(Fixed(), data, tmp_path / "alone"))
    kept = [sorted((tmp_path / name).rglob("*.safetensors")) for name in ("ray", "alone")]
    assert [path.read_bytes() for path in kept[0]] == [path.read_bytes() for path in kept[1]]
    assert len(kept[0]) == 2


def test_thresholds_tuned_by_actors_are_those_of_one_process(
    ray: Any, weights: Path, data: Path, tmp_path: Path
) -> None:
    made = Experiment("mine", "mine", (Variant("gates", "paper", per_gate=0.25),))
    usual = Settings(data, {"base": weights}, videos=1, frames=3, threads=1)
    reports = [
        evaluate(made, replace(usual, out=tmp_path / name, ray=address, workers=1))
        for name, address in (("ray", ""), ("alone", None))
    ]
    one, other = (report.to_dict() for report in reports)
    assert one["settings"] == other["settings"]
    assert one["rows"] == other["rows"]
    assert len(next(iter(one["settings"]["variants"].values()))["gates"]) > 4


@pytest.mark.slow
def test_a_video_that_kills_its_workers_ends_the_run(ray: Any, data: Path, tmp_path: Path) -> None:
    with (
        RayWorkers(count=1, threads=1) as workers,
        pytest.raises(WorkerError, match="3 workers ended at ILSVRC2015_val"),
    ):
        workers.run(items(Deadly(), data, tmp_path))


def test_a_cluster_without_room_says_so(ray: Any, data: Path, tmp_path: Path) -> None:
    with (
        RayWorkers(count=2, threads=1) as workers,
        pytest.raises(ClusterError, match=r"room for 1 workers.*--workers"),
    ):
        workers.run(items(Fixed(), data, tmp_path))
    with (
        RayWorkers(count=1, device="cuda") as workers,
        pytest.raises(ClusterError, match="room for 0 workers"),
    ):
        workers.run(items(Fixed(), data, tmp_path))


def test_another_version_or_other_weights_are_refused(weights: Path) -> None:
    here = Place.here([str(weights)])
    here.refuse(here)
    older = replace(here, host="node-7", versions={**here.versions, "torch": "1.0"})
    with pytest.raises(WorkerError, match=r"node-7 has torch 1\.0"):
        here.refuse(older)
    for digest, what in ((None, "cannot be read"), ("0", "another file")):
        other = replace(here, host="node-7", weights={str(weights): digest})
        with pytest.raises(WorkerError, match=f"{what} on node-7"):
            here.refuse(other)
    assert Place.here(["/nowhere"]).weights == {"/nowhere": None}


def test_an_actor_returns_errors_as_values(data: Path, tmp_path: Path) -> None:
    actor = Actor("cpu", torch.get_num_threads())
    (first, second) = items(Fixed(), data, tmp_path)
    found = actor.run(first)
    assert found.result is not None
    assert found.problem is None
    assert found.error is None
    assert (actor.frames(first.index), actor.frames(second.index)) == (12, 0)
    lost = actor.run(replace(first, job=Astray()))
    assert isinstance(lost.problem, MissingFileError)
    assert lost.result is None

    confused = actor.run(replace(first, job=Confused()))
    assert isinstance(confused.error, ClusterError)
    assert confused.result is None


def test_damaged_data_is_a_problem_everywhere(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (item, _) = items(Fixed(), data, tmp_path)

    def broken(self: Any) -> Iterator[Any]:
        raise DamagedMediaError("half a picture")
        yield

    with pytest.raises(WorkerError):
        ray_workers._confirm(item, DamagedMediaError("half a picture"))
    monkeypatch.setattr(type(item.video), "__iter__", broken)
    ray_workers._confirm(item, DamagedMediaError("half a picture"))


def test_without_ray_the_error_names_the_extra(
    data: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", ["eventful", *command(data, weights, tmp_path, "--ray")])
    with (
        pytest.raises(MissingDependencyError, match=r"eventful-transformers\[cluster\]"),
        ray_session(),
    ):
        pass
    with pytest.raises(SystemExit):
        main()
    assert "[cluster]" in capsys.readouterr().err


def test_an_address_that_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ClusterError, match=r"client protocol.*HOST:PORT"),
        ray_session("ray://head:10001"),
    ):
        pass

    def refuse(**options: Any) -> None:
        raise ConnectionError("refused")

    errors = SimpleNamespace(RayError=RuntimeError)
    fake = SimpleNamespace(init=refuse, is_initialized=lambda: False, exceptions=errors)
    monkeypatch.setattr(extras, "require", lambda name: fake)
    with (
        pytest.raises(ClusterError, match=r"No Ray cluster at head:6379.*RAY_AUTH_TOKEN_PATH"),
        ray_session("head:6379"),
    ):
        pass
    fake.ENABLE_RAY_CLUSTER = True
    with pytest.raises(ClusterError, match="before importing"), ray_session():
        pass


def test_a_port_that_others_can_reach_stops_ray(monkeypatch):
    class Stopped:
        calls = 0

        def shutdown(self) -> None:
            self.calls += 1

    ray, ports = Stopped(), [Listening("127.0.0.1", 1, 7), Listening("::1", 2, 7)]
    monkeypatch.setattr(session, "children", lambda _: {7, 9})
    monkeypatch.setattr(session, "listening", lambda: ports)
    session._check_ports(ray, set())
    ports.append(Listening("0.0.0.0", 3, 8))  # another program's
    ports.append(Listening("0.0.0.0", 5, 9))  # a child that was there before Ray
    session._check_ports(ray, {9})
    assert ray.calls == 0
    ports.append(Listening("0.0.0.0", 4, 7))
    with pytest.raises(ClusterError, match=r"0\.0\.0\.0:4, which other machines can reach"):
        session._check_ports(ray, {9})
    assert ray.calls == 1
    monkeypatch.setenv("EVENTFUL_RAY_PORTS", "open")
    session._check_ports(ray, set())
    assert ray.calls == 1
