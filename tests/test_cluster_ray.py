"""A cluster on Ray: one short run with its ports, and faults on purpose (slow)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.cluster.faults import FAULTS
from benchmarks.cluster.setting import Setting, audit, running
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
        summary = run.finish(60)
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
        assert run.process.wait(60) == 2
    assert "bind it to loopback" in (tmp_path / "log.txt").read_text()


def test_a_model_that_is_none_ends_the_run_and_says_so(tmp_path):
    setting = Setting(tmp_path, cameras=1, frames=25, cluster={"model": "timm:no_such_model"})
    with running(setting) as run:
        assert run.process.wait(120) == 2
    assert "no_such_model" in (tmp_path / "log.txt").read_text()


def test_a_registry_that_cannot_start_again_is_revived(tmp_path):
    """Its file is away for a while when it is killed: each new process fails, until it is back."""
    setting = Setting(tmp_path, cameras=2, frames=1500)
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
        run.finish(60)
    assert audit(setting.out).sound


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_counted_twice_and_the_gaps_are_those_reported(fault, tmp_path):
    if fault == "disk" and (os.geteuid() != 0 or not sys.platform.startswith("linux")):
        pytest.skip("needs to mount a tmpfs")
    found = FAULTS[fault](tmp_path)
    assert found["sound"], found
    assert found["status"] in ("complete", "interrupted")
    if fault == "every":
        assert found["audit"]["counted"] == found["audit"]["frames"]
    if fault == "driver":
        assert not found["processes_left"]
    if fault == "hang":
        assert found["killed"]
    if fault == "disk":
        assert found["error_shown"]
        assert found["audit"]["missed"]["disk full"]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
