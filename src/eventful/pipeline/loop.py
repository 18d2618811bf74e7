"""Runs a model on the frames of sources, and writes what it finds: `eventful run` in Python.

from eventful.pipeline.loop import run
from eventful.pipeline.settings import RunSettings

result = run("detector", ["street.mp4"], RunSettings(out=Path("street"), compare=True))
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from eventful import __version__
from eventful.bench.results import origin
from eventful.errors import ConfigError, EventfulError, NoMatchError, SnapshotError
from eventful.pipeline import folder as folders
from eventful.pipeline.folder import RunFolder
from eventful.pipeline.history import RunFacts
from eventful.pipeline.outputs import (
    COMPLETE,
    FAILED,
    INTERRUPTED,
    RUNNING,
    WAITING,
    Observer,
    Outputs,
)
from eventful.pipeline.report import write_report
from eventful.pipeline.results import check_format, last_frames, open_results
from eventful.pipeline.rows import History, RowFile, trim
from eventful.pipeline.scoring import Scores
from eventful.pipeline.settings import RunSettings
from eventful.pipeline.source_run import SourceRun
from eventful.pipeline.sources import SourceName, find_sources, missing_file
from eventful.pipeline.stopping import Stop, StopRequested
from eventful.pipeline.subject import Subject, open_subject
from eventful.surgery.inspection import inspect
from eventful.surgery.libraries import load

_POLL = 0.005  # seconds between two looks at live sources of which none has a frame


@dataclass(frozen=True)
class RunResult:
    """A run that ended.

    Attributes:
        status: complete, interrupted or failed.
        failed: messages by source.
        summary: what `run.json` holds.
    """

    status: str
    folder: Path
    summary: dict[str, Any]
    failed: dict[str, str]


def run(
    model: str | nn.Module,
    sources: Sequence[str],
    settings: RunSettings | None = None,
    *,
    observer: Observer | None = None,
    stop: Stop | None = None,
) -> RunResult:
    """Run a model on sources, and write results, videos and a report to a folder.

    All sources are run, even if one fails. Files come one after the other. Cameras and addresses,
    which may never end, come last and take turns.

    Args:
        model: as `eventful.pipeline.models.open_model` takes it, or a module.
        sources: what `eventful.read` takes, `world:7`, `world:street?videos=3`.
        stop: ends the run when it is requested; `stop.on_signals()` connects it with ctrl-C.

    Raises:
        EventfulError: The model, the settings or the folder cannot be used, or none of the files
            is there. What happens to one source does not raise: see `RunResult.failed`.
        OSError: The summary cannot be written, as on a full disk.
    """
    settings = settings or RunSettings()
    names = find_sources([str(source) for source in sources], settings.frames)
    subject = open_subject(model, weights=settings.weights, size=settings.size)
    subject.to(settings.device, settings.dtype)
    _check(subject, settings)
    out = _begin(subject, names, settings, observer or Observer(), stop or Stop())
    began = time.perf_counter()
    count = out.history.count
    interrupted = False
    try:
        _run_all(out, names)
    except (StopRequested, KeyboardInterrupt):
        interrupted = True
    seconds = time.perf_counter() - began
    out.results.close()
    out.rows.close()
    failed = {name: about["error"] for name, about in out.about.items() if about.get("error")}
    status = INTERRUPTED if interrupted else FAILED if failed else COMPLETE
    summary = _summary(out, status)
    frames = (out.history.count - count) * subject.step_frames
    summary["fps"] = frames / seconds if seconds else None
    summary["seconds"] = seconds
    if settings.report and (out.history.count > count or not _reported(out)):
        _report(out, names, summary)
    elif settings.report:
        summary["report"] = folders.REPORT
    out.folder.write(summary)
    return RunResult(status, settings.out, summary, failed)


def _check(subject: Subject, settings: RunSettings) -> None:
    """Raise for what is missing before any work is done."""
    detects = subject.kind in (None, "detections")
    if settings.track is not None:
        if not detects:
            raise ConfigError(f"--track follows detections; {subject.name} gives {subject.kind}.")
        load("trackers")
    if settings.video:
        load("av")
    if (settings.video or settings.report) and subject.kind == "detections":
        load("supervision")
    check_format(settings.format, subject.kind)
    if settings.dense:
        return
    settings.update_rule()
    if not inspect(subject.model).matched:
        raise NoMatchError(
            f"{subject.name} has no blocks that can be made eventful (`eventful inspect` and "
            "docs/adapters.md say which can). --dense runs it whole."
        )


def _check_files(names: Sequence[SourceName], settings: RunSettings) -> None:
    """Before anything is written: some source is there, and none would be deleted.

    Raises:
        ConfigError: A source lies in the folder that is to be replaced.
        MissingFileError: No source is there.
    """
    gone = [missing_file(source) for source in names]
    if gone and gone[0] is not None and all(gone):
        raise gone[0]
    inside = settings.out.resolve()
    for source, missing in zip(names, gone, strict=True):
        path = Path(source.address)
        own = missing is None and path.exists() and path.resolve().is_relative_to(inside)
        if settings.overwrite and own:
            raise ConfigError(
                f"{source.name} lies in {settings.out}, which --overwrite replaces. Move the "
                "video, or choose another folder with --out."
            )


def _begin(
    subject: Subject,
    names: Sequence[SourceName],
    settings: RunSettings,
    observer: Observer,
    stop: Stop,
) -> Outputs:
    """Open the folder and its files; a run that is resumed goes on behind its last results."""
    _check_files(names, settings)
    folder = RunFolder(settings.out)
    folder.begin(subject.name, [source.name for source in names], settings)
    history = History()
    if folder.before:
        history = trim(folder.path / folders.FRAMES, last_frames(folder.path, settings.format))
    sides: tuple[str, ...] = ("dense",) if settings.dense else ("eventful",)
    sides += ("dense",) if settings.compare else ()
    out = Outputs(
        subject,
        settings,
        folder,
        RowFile(folder.path / folders.FRAMES),
        open_results(folder.path, settings.format),
        history,
        Scores(subject.classes, sides),
        observer,
        stop,
        origin(settings.device),
    )
    out.about = {source.name: folder.about(source.name) for source in names}
    for about in out.about.values():
        for old in ("error", "notes"):
            about.pop(old, None)
        about.setdefault("status", WAITING)
    for source in names:
        _restore_scores(out, source)
    out.save = lambda: folder.write(_summary(out, RUNNING))
    out.save()
    return out


def _restore_scores(out: Outputs, source: SourceName) -> None:
    """Go on with the scores of a run before.

    Without them, as after a power cut, accuracy is of the frames from now on: `scored_frames`.
    """
    last = out.history.last.get(source.name, -1)
    if last < 0 or out.about[source.name].get("scored") != last:
        return
    try:
        out.scores.restore(source.name, out.folder.state(source.slug, "scores"))
    except SnapshotError as error:
        out.note(source.name, f"is scored from frame {last + 1} on only. {error}")


def _run_all(out: Outputs, names: Sequence[SourceName]) -> None:
    """Files one after the other, then what is live in turns."""
    for source in names:
        if not source.live:
            _drive([SourceRun(out, source)], out.stop)
    _drive([SourceRun(out, source) for source in names if source.live], out.stop)


def _drive(runs: list[SourceRun], stop: Stop) -> None:
    """Step some sources in turns until all have ended; one that fails does not end the others.

    One that has no frame yet, such as a lost camera, does not hold up the others.
    """
    going = list(runs)
    try:
        while going:
            due = [source for source in going if len(going) == 1 or not source.waits]
            for source in due:
                if not _guarded(source):
                    going.remove(source)
            if not due:
                with stop.waiting():
                    time.sleep(_POLL)
    except BaseException:
        for source in going:
            source.end(INTERRUPTED)
        raise


def _guarded(source: SourceRun) -> bool:
    """One step; False once the source has ended, in whatever way."""
    try:
        if source.step():
            return True
        source.end(COMPLETE)
    except StopRequested:
        raise
    except EventfulError as error:
        source.end(FAILED, str(error))
    except Exception as error:  # of a model or library: told by name, and the others go on
        source.end(FAILED, f"{type(error).__name__}: {error}")
    return False


def _summary(out: Outputs, status: str) -> dict[str, Any]:
    """What `run.json` holds."""
    accuracy = out.scores.accuracy() if status != RUNNING else {}
    return {
        "eventful": __version__,
        "status": status,
        "model": out.subject.name,
        "random_weights": out.subject.random,
        "kind": out.subject.kind,
        **out.history.summary(),
        "frames": out.history.count * out.subject.step_frames,
        "accuracy": accuracy,
        "scored_frames": out.scores.frames if accuracy else 0,
        "lost": _lost(out),
        "losses": sum(about.get("losses", 0) for about in out.about.values()),
        "memory": sum(about.get("memory", 0) for about in out.about.values()),
        "sources": out.about,
        "results": out.results.path.name,
        "settings": out.settings.shown(),
        "fixed": folders.as_json(out.settings.fixed()),
        "versions": out.versions,
    }


def _lost(out: Outputs) -> dict[str, int]:
    """Frames that were not used, by reason."""
    lost: dict[str, int] = {}
    for about in out.about.values():
        for reason in ("damaged", "dropped", "unused"):
            lost[reason] = lost.get(reason, 0) + about.get(reason, 0)
    return {reason: count for reason, count in lost.items() if count}


def _reported(out: Outputs) -> bool:
    """Whether a run before has left a report; it has pictures of frames that are not at hand."""
    return (out.folder.path / folders.REPORT).is_file()


def _report(out: Outputs, names: Sequence[SourceName], summary: dict[str, Any]) -> None:
    """Write the HTML report, and note it in the summary."""
    facts = RunFacts(
        model=out.subject.name,
        sources=tuple(source.name for source in names),
        settings=out.settings.shown(),
        accuracy=summary["accuracy"],
        lost=summary["lost"],
        memory=summary["memory"],
        versions=summary["versions"],
        totals=out.history.totals(out.subject.step_frames),
    )
    path = out.folder.path / folders.REPORT
    write_report(path, facts, out.history.rows, out.stills.chosen())
    summary["report"] = path.name
