"""Wrong plans, starts and edits: one message, and nothing left in the way of a right one."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from commands import here  # noqa: F401
from eventful.cluster.accounts import Account
from eventful.cluster.events import Events
from eventful.cluster.folder import LOCK, STATE, run_folder, signal_run
from eventful.cluster.metrics_server import MetricsServer
from eventful.cluster.plan_file import PlanFile
from eventful.cluster.ray_engine import _hide_token
from eventful.cluster.registry import LEDGER
from eventful.cluster.run import ClusterResult, RunOptions, run
from eventful.cluster.sources import StreamSpec, read_plan
from eventful.cluster.store import Store
from eventful.errors import ConfigError, EventfulError, MissingFileError, RunError

ONE = '[[stream]]\nname = "a"\nsource = "x.mp4"\n'


@pytest.fixture
def path(tmp_path) -> Path:
    made = tmp_path / "sources.toml"
    made.write_text(ONE)
    return made


class NoEngine(EventfulError):
    """Everything else was right."""


def start(path: Path, out: Path, **options: Any) -> None:
    def open_engine(plan: Any, space: str) -> Any:
        raise NoEngine

    run(path, RunOptions(out, **options), open_engine=open_engine)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stream = [1, 2]\n", "as a table"),
        ("[cluster]\nsize = [1]\n", "size is"),
        ("[cluster]\nsize = true\n", "size is"),
        ("[cluster]\nscore = 7\n", "from 0 to 1"),
        ('[cluster]\ndtype = "foo"\n', "float32"),
        ('[cluster]\ndevice = "foo"\n', "cuda"),
        ("[cluster]\ncpus = -1\n", "cpus is at least 0"),
        ("[cluster]\ngpus = -1\n", "gpus is at least 0"),
        ("[cluster]\ndeadline = nan\n", "deadline is a number"),
        (ONE + "rate = inf\n", "rate is a number"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(path, text, words):
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_plan(path)


def test_sizes_are_read_in_every_form(path):
    for text, size in {"518": 518, "[64, 96]": (64, 96), '"64x96"': (64, 96)}.items():
        path.write_text(f"[cluster]\nsize = {text}\n")
        assert read_plan(path).cluster.model.size == size


def test_a_plan_that_cannot_be_read_is_refused(path):
    path.write_bytes(b'[cluster]\nmodel = "\xff"\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(path.parent)


def test_a_wrong_start_does_not_block_the_right_one(path, tmp_path):
    out = tmp_path / "out"
    text = path.read_text()
    for results in ("csv", "no.module:f", ".x:c"):
        path.write_text(f'[cluster]\nresults = "{results}"\n' + text)
        with pytest.raises(ConfigError):
            start(path, out)
    path.write_text(text)
    for address in ("99999", "²", "x:y", "256.1.1.1:80"):
        with pytest.raises(ConfigError, match="--metrics"):
            start(path, out, metrics=address)
    path.write_text("")
    with pytest.raises(ConfigError, match="no streams"):
        start(path, out)
    assert not out.exists()
    path.write_text(text)
    for _ in range(2):  # Ray does not start: the second attempt is the same as the first one
        with pytest.raises(NoEngine):
            start(path, out)
    store = Store(out / STATE / LEDGER)  # of a run whose model could not be loaded
    store.write([Account("a")])
    store.close()
    with pytest.raises(NoEngine):
        start(path, out)
    store = Store(out / STATE / LEDGER)
    store.write([Account("a", position=3)])
    store.close()
    with pytest.raises(ConfigError, match="--resume"):
        start(path, out)


def test_a_port_is_given_back_where_the_start_fails(path, tmp_path):
    server = MetricsServer("0")
    port = str(server.port)
    server.close()
    for _ in range(2):
        with pytest.raises(NoEngine):
            start(path, tmp_path / "out", metrics=port)


def test_what_a_killed_process_was_writing_is_deleted(path, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(NoEngine):
        start(path, out)
    (out / STATE / "snapshots").mkdir()
    left = [out / STATE / "calling.json.1-2.partial", out / STATE / "snapshots/a.1-2.partial"]
    store = Store(out / STATE / LEDGER)
    store.write([Account("a", position=3)])
    store.close()
    for each in left:
        each.write_text("half")
    with pytest.raises(NoEngine):
        start(path, out, resume=True)
    assert not any(each.exists() for each in left)


def test_a_signal_goes_to_the_process_that_runs_and_to_no_other(path, tmp_path, monkeypatch):
    out, sent = tmp_path / "out", []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    parts = dict.fromkeys(("registry", "workers", "readers", "streams", "problems", "events"))
    with run_folder(out, read_plan(path), resume=False, overwrite=False):
        # The status is still that of an earlier run, whose number another program has now.
        status = {**parts, "pid": 1, "time": 0.0}
        (out / STATE / "status.json").write_text(json.dumps(status))
        signal_run(out, signal.SIGHUP)
        assert sent == [(os.getpid(), signal.SIGHUP)]
        assert int((out / STATE / LOCK).read_text()) == os.getpid()
    with pytest.raises(RunError, match="Nothing runs"):
        signal_run(out, signal.SIGHUP)
    assert len(sent) == 1


def test_commands_end_with_one_message(path, tmp_path, here):
    for words in (
        ("add", tmp_path / "none.toml", "b", "x.mp4"),
        ("add", tmp_path, "b", "x.mp4"),
        ("add", path, "b", "x\udcff.mp4"),
        ("add", path, "b", "x.mp4", "--rate", "inf"),
        ("remove", tmp_path / "none.toml", "b"),
        ("remove", tmp_path, "b"),
    ):
        done = here("cluster", *words)
        assert done.returncode == 2, words
        assert "Traceback" not in done.stderr
    for text in ("{}", "[]", '{"time": "x"}'):
        state = tmp_path / "run" / STATE
        state.mkdir(parents=True, exist_ok=True)
        (state / "status.json").write_text(text)
        done = here("cluster", "status", "--out", tmp_path / "run")
        assert done.returncode == 2
        assert "holds no run" in done.stderr


def test_sources_that_cannot_be_named_say_so(monkeypatch):
    with pytest.raises(ConfigError, match="UTF-8"):
        StreamSpec("a", "x\udcff.mp4")
    monkeypatch.setenv("GATE", "http://u:s3cret@[::1/x\n")
    with pytest.raises(ConfigError, match="IPv6") as caught:
        StreamSpec("a", "env:GATE").found()
    assert "s3cret" not in str(caught.value)
    monkeypatch.setenv("GATE", "rtsp://u:s3cret@host/x\n")  # as a file of secrets ends
    assert StreamSpec("a", "env:GATE").found().address == "rtsp://u:s3cret@host/x"
    assert StreamSpec("a", " rtsp://u:s3cret@host/x").found().live
    assert StreamSpec("a", "world:7?frames=48").found().name == "world:7?frames=48"


class Edited:
    """A file under a watch whose clock is ours."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 0.0
        self.events = Events(path.parent / "events.jsonl")
        self.file = PlanFile(path, self.events, lambda: self.now)
        self.plan = read_plan(path)

    def after(self, seconds: float) -> list[str]:
        """Names of the streams when so much time has passed."""
        self.now += seconds
        self.plan = self.file.turn(self.plan) or self.plan
        return [stream.name for stream in self.plan.streams]


def test_an_edit_is_taken_over_when_it_is_whole(path):
    edited, text = Edited(path), path.read_text()
    path.write_text("")  # an editor is at work
    assert edited.after(0.1) == ["a"]
    path.write_text(text + ONE.replace('"a"', '"b"'))
    assert edited.after(0.1) == ["a"]
    assert edited.after(0.1) == ["a"]
    assert edited.after(0.3) == ["a", "b"]
    assert not edited.events.last


def test_an_edit_that_cannot_be_used_changes_nothing(path):
    edited, text = Edited(path), path.read_text()
    for content, what in {
        b"# \xff\n" + text.encode(): "cannot be used",
        b"": "no streams",
        b"[[stream]\n": "cannot be used",
    }.items():
        path.write_bytes(content)
        assert edited.after(0.1) == ["a"]
        assert edited.after(1.0) == ["a"]
        assert what in edited.events.last[-1]["event"]
    path.unlink()
    with pytest.raises(MissingFileError):
        read_plan(path)
    assert edited.after(1.0) == ["a"]
    path.mkdir()
    assert edited.after(1.0) == ["a"]
    assert edited.after(1.0) == ["a"]


def test_a_damaged_run_can_be_replaced(path, tmp_path):
    out = tmp_path / "out"
    (out / STATE).mkdir(parents=True)
    (out / STATE / LEDGER).write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(RunError, match="--overwrite"):
        start(path, out)
    with pytest.raises(NoEngine):
        start(path, out, overwrite=True)


def test_the_token_of_ray_is_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    _hide_token()  # none is there
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0")
    token.chmod(0o644)
    _hide_token()
    assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("status", "waiting", "code"),
    [("complete", 0, 0), ("incomplete", 3, 1), ("interrupted", 3, 130)],
)
def test_the_exit_code_says_whether_results_arrived(
    path, tmp_path, here, monkeypatch, status, waiting, code
):
    summary = {
        "frames": {"counted": 3},
        "streams": [],
        "problems": {},
        "registry": {"waiting": waiting, "problem": "disk full" if waiting else ""},
    }
    result = ClusterResult(status, summary)
    monkeypatch.setattr("eventful.cli.cluster_work.run_cluster", lambda *args, **options: result)
    done = here("cluster", "run", path, "--out", tmp_path / "out")
    assert done.returncode == code
    assert ("3 results have not reached" in done.stderr) == bool(waiting)
    assert ("disk full" in done.stderr) == bool(waiting)
