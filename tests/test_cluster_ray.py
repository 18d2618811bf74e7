"""A cluster on Ray: one short run with its ports, and faults on purpose (slow)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import faults
from benchmarks.cluster.faults import FAULTS
from benchmarks.cluster.setting import PATIENCE, Run, Setting, audit, running
from eventful.remote.ports import children, listening

# Ray is not imported here: the processes that are tested set it up themselves.
missing = importlib.util.find_spec("ray") is None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing, reason="Ray is not installed")]

SECRET = "s3cret-word"


def test_what_listens_is_seen():
    with socket.socket() as open_one, socket.socket() as loopback:
        open_one.bind(("0.0.0.0", 0))
        loopback.bind(("127.0.0.1", 0))
        for each in (open_one, loopback):
            each.listen()
        mine = {each.port: each.host for each in listening() if each.pid == os.getpid()}
        assert mine[open_one.getsockname()[1]] == "0.0.0.0"
        assert mine[loopback.getsockname()[1]] == "127.0.0.1"


def test_a_short_run_listens_on_loopback_alone_and_tells_no_password(tmp_path):
    port = _free_port()
    setting = Setting(tmp_path, cameras=2, frames=400, stream={"loop": True})
    with setting.plan.open("a") as file:
        address = f"http://admin:{SECRET}@127.0.0.1:9/x.mp4"
        file.write(f'\n[[stream]]\nname = "gate"\nsource = "{address}"\nmode = "latest"\n')
    with running(setting, "--metrics", str(port)) as run:
        found = run.wait_for(
            lambda now: (
                any(s["message"] for s in now["streams"])
                and sum(s["counted"] for s in now["streams"]) > 20
            )
        )
        mine = children(run.process.pid) | {run.process.pid}
        sockets = [each for each in listening() if each.pid in mine]
        assert len(sockets) >= 6  # of GCS, raylet, workers, the driver and its metrics
        assert {each.host for each in sockets} <= {"127.0.0.1", "::1"}
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            metrics = answer.read().decode()
        commands = [_text(f"/proc/{pid}/cmdline") + _text(f"/proc/{pid}/environ") for pid in mine]
        logs = Path(f"/proc/{run.process.pid}/root/tmp/ray/session_latest").resolve()
        run.process.send_signal(signal.SIGINT)
        summary = run.finish(180)
    assert summary["code"] == 130
    told = [json.dumps(found), metrics, (tmp_path / "log.txt").read_text(), *commands]
    told += [path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file()]
    told += [path.read_text(errors="replace") for path in setting.out.rglob("*") if path.is_file()]
    assert not any(SECRET in text for text in told)
    assert "usage_stats" not in "".join(path.name for path in logs.iterdir())
    assert audit(setting.out).sound


def test_a_port_that_others_can_reach_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    setting = Setting(tmp_path, cameras=1, frames=25)
    with running(setting) as run:
        assert run.process.wait(180) == 2
    assert "bind it to loopback" in (tmp_path / "log.txt").read_text()


def test_a_model_that_is_none_ends_the_run_and_says_so(tmp_path):
    setting = Setting(tmp_path, cameras=1, frames=25, cluster={"model": "timm:no_such_model"})
    with running(setting) as run:
        assert run.process.wait(180) == 2
    assert "no_such_model" in (tmp_path / "log.txt").read_text()


def test_a_registry_that_cannot_start_again_is_revived(tmp_path):
    """Its file is away for a while when it is killed: each new process fails, until it is back."""
    setting = Setting(tmp_path, cameras=2, frames=400, stream={"loop": True})
    with running(setting) as run:
        found = run.running(20)
        state = setting.out / "state"
        state.chmod(0o700)
        hidden = tmp_path / "hidden"
        state.rename(hidden)
        state.write_text("")  # no folder: nothing can be opened in it
        os.kill(found["registry"]["pid"], signal.SIGKILL)
        time.sleep(12)
        state.unlink()
        hidden.rename(state)
        count = len(run.rows)
        end = time.monotonic() + 60
        while len(run.rows) <= count and time.monotonic() < end:
            time.sleep(0.1)
        assert len(run.rows) > count
        # Kept in memory and written with the status: the file of events was away, too.
        run.wait_for(lambda now: any(e["event"] == "revived" for e in now["events"]), 30)
        run.process.send_signal(signal.SIGINT)
        run.finish(180)
    assert audit(setting.out).sound


class Endless(Setting):
    """Cameras that do not end before the faults, however slow or fast this machine is."""

    def __post_init__(self) -> None:
        if self.rate is not None:
            self.stream = {**self.stream, "loop": True}
        super().__post_init__()


def ended(run: Run, seconds: float = 600) -> dict[str, Any]:
    """Ends a run of endless cameras; what it says."""
    if run.process.poll() is None and run.setting.rate is not None:
        run.process.send_signal(signal.SIGINT)
    return FINISH(run, seconds)


FINISH = Run.finish


# `camera` is about streams that end, and `disk` needs to know when it is full: see below.
@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ("camera", "disk")])
def test_nothing_is_counted_twice_and_the_gaps_are_those_reported(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "Setting", Endless)
    monkeypatch.setattr(Run, "finish", ended)
    if fault != "every":  # up to the position that the run reports
        monkeypatch.setattr(faults, "audit", lambda out, frames: audit(out))
    kill, below = Run.kill, []

    def killed(run: Run) -> None:
        kill(run)
        below.extend(run.left)

    monkeypatch.setattr(Run, "kill", killed)
    found = FAULTS[fault](tmp_path)
    check(found)
    if fault == "every":
        assert found["audit"]["counted"] == found["audit"]["frames"]
    if fault == "driver":
        assert below
        # Agents of Ray look for a GCS that is gone for a minute before they end.
        wait_until(lambda: not any(faults._exists(pid) for pid in below))
    if fault == "hang":
        assert found["killed"]


def test_a_camera_that_goes_and_comes_back(tmp_path):
    check(FAULTS["camera"](tmp_path))


def check(found: dict[str, Any]) -> None:
    assert found["sound"], found
    assert found["status"] in ("complete", "interrupted")


def test_a_full_disk(tmp_path):
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("needs to mount a tmpfs")
    port = _free_port()
    setting = Endless(tmp_path, frames=500, cluster={"queue": 300, "snapshot_every": 0})
    setting.out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "tmpfs", str(setting.out)]
    subprocess.run(mount, check=True)
    try:
        with running(setting, "--metrics", str(port)) as run:
            run.running(20)
            filler = setting.out / "state" / "filler"
            faults._fill(filler)
            # The status is on the full disk; the numbers of the driver are not.
            wait_until(lambda: _missed(port, "disk full") > 0)
            assert "Results wait" in (tmp_path / "log.txt").read_text()
            counted = len(run.rows)
            filler.unlink()
            wait_until(lambda: len(run.rows) > counted)
            summary = ended(run)
        found = audit(setting.out)
    finally:
        subprocess.run(["umount", str(setting.out)], check=True)
    assert summary["code"] == 130
    assert found.sound, found
    assert found.missed["disk full"]


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def _missed(port: int, reason: str) -> float:
    """What a run reports of frames without a result."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    named = [line for line in lines if "frames_missed_total{" in line and reason in line]
    return sum(float(line.rpartition(" ")[2]) for line in named)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
