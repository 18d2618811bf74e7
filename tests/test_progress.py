"""Long commands say now and then what they do, also where nobody watches a terminal."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest

import tiny_models
from commands import here
from eventful.cli import bench, progress, train_run
from eventful.paper.evaluate import runtime
from eventful.paper.train.engine import StepProgress

__all__ = ["here"]  # a fixture


def printed(capsys, what, seconds: float = 60.0) -> str:
    """What stderr got, once something is in it so many times: `what` is a text and a number."""
    text, count = what
    found, end = "", time.monotonic() + seconds
    while found.count(text) < count:
        assert time.monotonic() < end, found
        time.sleep(0.01)
        found += capsys.readouterr().err
    return found


def test_a_stage_that_reports_nothing_prints_lines(monkeypatch, capsys) -> None:
    """A compiler may take minutes in one call."""
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with progress.shown("vivit", "frames") as report:
        report("building dense compile")
        err = printed(capsys, ("vivit: building dense compile, ", 3))
        report("timing", 3, 8, "loss 0.5")
        err += printed(capsys, ("loss 0.5", 1))
    lines = [line for line in err.splitlines() if "preparing" not in line]  # of a slow start
    assert lines[0] == "vivit: building dense compile"
    assert re.fullmatch(r"vivit: building dense compile, \d+ s", lines[1])
    assert re.search(r"(?m)^vivit: timing, 3 of 8 frames, loss 0\.5, \d+ s$", err)
    assert capsys.readouterr().out == ""
    time.sleep(0.1)
    assert capsys.readouterr().err == ""  # nothing after the end


def test_many_steps_of_one_stage_are_one_line(capsys) -> None:
    with progress.shown("a model") as report:
        for t in range(500):
            report(*progress.counted(f"frame {t + 1} of 500"))
    assert capsys.readouterr().err.splitlines() == ["a model: frame"]


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with progress.shown("a model", "frames") as report:
        report("timing", 3, 8)
        err = printed(capsys, ("3/8 frames", 1))
    out, rest = capsys.readouterr()
    assert out == ""
    err += rest
    assert "3 of 8" not in err


def test_a_command_that_fails_prints_no_more(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)

    def fail():
        printed(capsys, ("preparing", 1))
        raise RuntimeError

    with pytest.raises(RuntimeError), progress.shown():
        fail()
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


def test_a_slow_runtime_benchmark_is_not_silent(monkeypatch, here) -> None:
    """The dense paths of a ViViT took 500 s, and nothing was printed."""
    monkeypatch.setattr(progress, "EVERY", 0.02)
    monkeypatch.setattr(runtime, "_recogniser", lambda size, plan: tiny_models.recogniser())

    lines, inner = [], progress._print
    monkeypatch.setattr(progress, "_print", lambda line: (lines.append(line), inner(line)))

    def slow(spec, tick, reset):
        tick("building dense eager")
        end = time.monotonic() + 60
        while len([line for line in lines if "building dense eager" in line]) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "dense_paths", slow)
    done = here("bench", "runtime", "--model", "vivit", "--size", "320", "--views", "1x1")
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert "vivit at 320 px: building the model and its videos" in lines
    assert sum("building dense eager" in line for line in lines) >= 3


def test_training_and_benchmarks_report_to_stderr(capsys) -> None:
    with train_run._training(SimpleNamespace(first=True)) as bar:
        for step in range(1, 4):
            bar.step(StepProgress(step, 3, 0, 0.5))
        bar.caching("train", 1, 2)
    with train_run._training(SimpleNamespace(first=False)) as other:  # one process reports
        other.step(StepProgress(1, 3, 0, 0.5))
    setting = SimpleNamespace(model="vit-s-576", batch=1, dtype="float32", device="cpu")
    with bench._progress(setting) as tick:
        for t in range(3):
            tick(f"warming up contender {t + 1} of 3")
        tick("peak memory")
    out, err = capsys.readouterr()
    assert out == ""
    name = "vit-s-576, batch 1, float32 on cpu"
    stages = ["training", "caching train"]
    assert err.splitlines() == [*stages, f"{name}: warming up contender", f"{name}: peak memory"]
