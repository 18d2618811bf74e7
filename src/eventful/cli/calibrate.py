"""`eventful calibrate`: videos and settings by name, progress, a table, and files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from eventful.bench.results import origin
from eventful.bench.video.measure import VideoPlan
from eventful.bench.video.model import load_backbone
from eventful.calibrate import curve
from eventful.calibrate.choose import Limits
from eventful.calibrate.measure import Clip, Measured, load_clip, measure, refuse_still
from eventful.calibrate.policy_file import policy_text, write_policy
from eventful.calibrate.report import PICTURE, POLICY, Report
from eventful.calibrate.rows import Row
from eventful.calibrate.settings import Setting, chosen_settings, distinct
from eventful.calibrate.thresholds import TunedHere, tuned_settings
from eventful.cli.bench import checked_device
from eventful.cli.bench_video import (
    head_of,
    load_head,
    number,
    open_jobs,
    percent,
    plan_of,
)
from eventful.cli.calibrate_ray import spread_over
from eventful.cli.options import Calibrated, Filming, Limited, Written
from eventful.cli.progress import shown
from eventful.cli.ray_options import HERE, OnCluster
from eventful.cli.tables import Column, Grid, show
from eventful.config import Config
from eventful.cost.times import without_times
from eventful.errors import ConfigError
from eventful.policies import Threshold

LEGEND = (
    "Tokens, ops: share of the tokens updated, and of the dense operations, means without the "
    "first frame. Time: total against the fastest dense path. Error: of the output tokens against "
    "dense: of the median frame, the one that 90 % of frames stay within, the worst frame. "
    "skip:k: dense on one frame in k, its output held in between."
)
_NOT_MET, _INTERRUPTED = 1, 130


def run(
    what: Calibrated, limited: Limited, how: Filming, written: Written, on: OnCluster = HERE
) -> None:
    """Measure, print, write; exit with 1 if no setting is within the limits."""
    limits = Limits(limited.error, limited.operations, limited.speed)
    if on.address is not None and how.timed:
        raise ConfigError(
            "--ray measures no times, which processes that share machines would disturb. Add "
            "--no-time."
        )
    if limits.speed is not None and not how.timed:
        raise ConfigError("--speed needs times; leave out --no-time.")
    if on.address is None:
        checked_device(how.device)
    if not what.videos and Path(what.model).exists():
        raise ConfigError(f"The model comes first: eventful calibrate MODEL {what.model}.")
    backbone = load_backbone(what.model, what.weights, what.size)
    plan = plan_of(backbone, what.size, how)
    # Workers have the devices; here the clips are looked at, and no model is run.
    clips = _clips(what, how, plan if on.address is None else replace(plan, device="cpu"))
    settings = _settings(what, clips)
    _make_folders(written, settings)
    if on.address is None:
        measured = _measured(what, plan, clips, settings)
    else:
        measured = spread_over(what, how, on, written.out, clips, settings)
    report = Report.of(plan, what.weights, measured, limits, origin(how.device))
    if not report.rows:
        print("Interrupted before anything was measured; nothing is kept.", file=sys.stderr)
        raise SystemExit(_INTERRUPTED)
    policy = _write(report, written)
    if written.as_json:
        print(json.dumps(report.to_dict()))
    else:
        _show(report)
        _conclude(report, written.out, policy)
    if report.config is None:
        print(_refused(report), file=sys.stderr)
    if measured.interrupted or report.config is None:
        raise SystemExit(_INTERRUPTED if measured.interrupted else _NOT_MET)


def _clips(what: Calibrated, how: Filming, plan: VideoPlan) -> list[Clip]:
    jobs = open_jobs(what.videos or (), what.labels or (), what.frames, what.size, how.seed)
    if not jobs:
        raise ConfigError(
            "Name a video behind the model: eventful calibrate MODEL street.mp4; or --labels with "
            "a MOTChallenge sequence."
        )
    head = None if what.head is None else load_head(what.head, plan.backbone, plan.device)
    return [
        load_clip(plan, job.footage, None if head is None else head_of(head, job)) for job in jobs
    ]


def _settings(what: Calibrated, clips: list[Clip]) -> list[Setting]:
    """What the user named, or the usual settings; with --per-gate the latter are left out."""
    shortest = min(len(clip.frames) for clip in clips)
    named = chosen_settings(what.setting or (), what.preset, shortest)
    if what.per_gate and not what.setting:
        return [setting for setting in named if setting.config is None]
    return named


def _make_folders(written: Written, settings: list[Setting]) -> None:
    """Before the long work: folders can be made, and every setting can be written."""
    path = _policy_path(written)
    for folder in (written.out, None if path is None else path.parent):
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{folder} cannot be made: {error.strerror}.") from None
    for setting in settings:
        if path is not None and setting.config is not None:
            policy_text(setting.config, {})


def _measured(
    what: Calibrated, plan: VideoPlan, clips: list[Clip], settings: list[Setting]
) -> Measured:
    refuse_still(clips)
    # Without times the result is for another machine, too: this one's must not decide on fallback.
    clock = nullcontext() if plan.timed else without_times()
    with shown(plan.backbone.name) as tick, clock:
        if what.per_gate:
            try:
                tuned = tuned_settings(TunedHere(clips), what.preset, tick)
                settings = distinct([*tuned, *settings])
            except KeyboardInterrupt:
                return Measured(clips, [], interrupted=True)
        return measure(plan, clips, settings, tick)


def _write(report: Report, written: Written) -> Path | None:
    """Write the files; the policy file only where a setting is within the limits."""
    out = written.out
    if out is not None:
        report.write(out)
        first = report.measured.clips[0]
        title = f"{', '.join(clip.name for clip in report.measured.clips)}: "
        title += f"{report.plan.backbone.name}, {first.size}, {report.plan.precision}"
        title += f" on {report.plan.device}"
        curve.draw(report.rows, report.choice, report.limits, title, out / PICTURE)
    path = _policy_path(written)
    if path is None or report.config is None:
        return None
    write_policy(path, report.config, report.about())
    return path


def _policy_path(written: Written) -> Path | None:
    return written.policy or (None if written.out is None else written.out / POLICY)


def _show(report: Report) -> None:
    from rich.console import Console

    console, first = Console(), report.measured.clips[0]
    for clip in report.measured.clips:
        if clip.about:
            console.print(f"{clip.name}: {clip.about}", highlight=False)
    data = report.to_dict()
    title = f"{', '.join(data['videos'])}, {data['model']}, {first.size}, {data['frames']} frames, "
    title += f"{data['precision']} on {data['device']}"
    caption = ""
    if report.dense is not None:
        caption = f"dense: {report.dense.path}, {_ms(data['dense_ms'])} ms"
    columns = _columns(report.rows)
    grid = Grid(
        [Column(heading, names=heading == "setting") for heading in columns],
        title=title,
        caption=caption,
    )
    chosen = report.choice.row if report.choice is not None and report.choice.met else None
    mark = "" if report.dense_is_cheaper else " *"
    for row in report.rows:
        cells = [cell(row) for cell in columns.values()]
        if row is chosen:
            cells[0] += mark
        grid.add(cells, "bold" if row is chosen and mark else "")
    show(console, grid)
    for note in report.notes:
        console.print(f"[dim]{note}[/]", highlight=False)


def _columns(rows: list[Row]) -> dict[str, Callable[[Row], str]]:
    """The columns that some row has a value for."""
    columns: dict[str, Callable[[Row], str]] = {
        "setting": lambda row: row.name,
        "tokens": lambda row: percent(row.updated),
        "ops": lambda row: percent(row.operations),
        "time": lambda row: percent(row.time),
        "ms": lambda row: _ms(row.ms),
        "error": lambda row: number(row.error, 2),
        "90 %": lambda row: number(row.error_p90, 2),
        "worst": lambda row: number(row.error_worst, 2),
        "mAP50": lambda row: percent(row.map50),
    }
    return {name: show for name, show in columns.items() if any(show(row) for row in rows)}


def _ms(value: float | None) -> str:
    return f"{value:,.0f}" if value is not None and value >= 100 else number(value, 3)


def _conclude(report: Report, out: Path | None, policy: Path | None) -> None:
    from rich.console import Console

    Console().print(LEGEND, highlight=False)
    if report.config is not None:
        assert report.choice is not None
        row = report.choice.row
        print(f"{_verdict(report)}: {row.name}{_brief(report.config)}")
        if policy is None:
            print("Write it to a file that Config.load takes with --policy FILE or --out DIR.")
    if out is not None:
        print(f"Numbers and picture: {out}")
    if policy is not None:
        print(f"Policy file: {policy}")


def _verdict(report: Report) -> str:
    """What is said of the chosen setting."""
    assert report.choice is not None
    limits = report.limits.text
    if report.dense_is_cheaper:
        return (
            f"Not recommended, the dense model is cheaper: the model or the frames are too small, "
            f"or too much changes. The cheapest for {limits} takes {report.choice.row.cost:.0%} of "
            "its cost"
        )
    if report.choice.better_skip is not None:
        return f"* The best for {limits} of those that look at every frame"
    return f"* Recommended for {limits}"


def _brief(config: Config) -> str:
    """The config behind its name; thresholds by gate would fill the screen."""
    policy = config.policy
    if isinstance(policy, Threshold) and isinstance(policy.h, Mapping):
        return f" ({len(policy.h)} gates)"
    return f", {config!r}"


def _refused(report: Report) -> str:
    """Why nothing is recommended."""
    choice, limits = report.choice, report.limits.text
    if choice is None:
        few = "Too few frames were measured." if report.measured.interrupted else ""
        advice = few or "No config was measured; name one with --setting."
        return f"Nothing measured reaches {limits}. {advice}"
    row = choice.row
    speed = "" if row.time is None else f", {1 / max(row.time, 1e-9):.2g} times the speed of dense"
    return (
        f"Nothing measured reaches {limits}. The nearest is {row.name}: an error of "
        f"{row.error_p90:.2g} (90 % of frames), {percent(row.operations)} of the operations{speed}."
        " No policy file was written. Loosen the limit, name other settings with --setting, or run "
        "the dense model."
    )
