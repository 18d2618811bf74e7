"""Runs `eventful train`: settings from options, a progress bar, and the final report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eventful.cli.options import TrainingFiles, TrainingRun
from eventful.models.shipped import named_or_file
from eventful.paper.data import Problems, recognise
from eventful.paper.data.problems import OnProblem, missing, stop
from eventful.paper.train.detector import DetectorPlan, train_detector
from eventful.paper.train.engine import LoopOptions, StepProgress
from eventful.paper.train.journal import read
from eventful.paper.train.processes import Processes, joined
from eventful.paper.train.recipes import EPIC, KINETICS, VID, Recipe
from eventful.paper.train.shipped import PHASES, VALIDATION, scored, train_shipped
from eventful.paper.train.temporal import TemporalPlan, TemporalTuning, views_of


def changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """A published recipe with the given values replaced."""
    return replace(recipe, **{name: value for name, value in changes.items() if value is not None})


def detector(
    plan: DetectorPlan, changes: dict[str, Any], files: TrainingFiles, run: TrainingRun
) -> None:
    """`eventful train vitdet`.

    Args:
        changes: fields of the recipe to replace.
    """
    problems = _on_problem(run)
    with joined(run.device) as processes, _Bar(processes, quiet=run.as_json).shown() as bar:
        train_detector(
            plan,
            named_or_file(files.weights),
            files.out,
            processes,
            recipe=changed(VID, changes),
            options=_loop_options(run),
            on_problem=problems,
            on_step=bar.step,
        )
        if processes.first:
            _report(files.out, run.as_json, {"skipped": _noted(problems)})


def temporal(
    plan: dict[str, Any],
    views: tuple[int, int],
    half: bool,
    changes: dict[str, Any],
    files: TrainingFiles,
    run: TrainingRun,
) -> None:
    """`eventful train vivit`.

    Args:
        plan: arguments of `TemporalPlan`.
        views: temporal and spatial ones.
        half: keep the cache in float16.
        changes: fields of the recipe to replace.
    """
    found = recognise(plan["data"])
    if found is None:
        raise missing(plan["data"], "EPIC-Kitchens or Kinetics in a known format")
    recipe = changed(KINETICS if found.name == "kinetics" else EPIC, changes)
    val_split = plan.pop("val_split") or found.splits(plan["data"])[0]
    made = TemporalPlan(
        **plan, val_split=val_split, cache_dtype=torch.float16 if half else torch.float32
    )
    problems = _on_problem(run)
    with joined(run.device) as processes, _Bar(processes, quiet=run.as_json).shown() as bar:
        tuning = TemporalTuning(
            made,
            named_or_file(files.weights),
            processes,
            workers=run.workers,
            on_problem=problems,
            on_cached=bar.caching,
        )
        seen = replace(views_of(tuning.model, found.name), temporal=views[0], spatial=views[1])
        tuning.plan = replace(made, train_views=seen, val_views=seen)
        result = tuning.run(files.out, recipe, _loop_options(run), bar.step)
        if processes.first:
            skipped = [*_noted(problems), *result.skipped]
            _report(files.out, run.as_json, {"scores": result.scores, "skipped": skipped})


def shipped(
    name: str,
    out: Path,
    device: str,
    minutes: float | None,
    scale: float,
    shard: int,
    as_json: bool,
) -> None:
    """`eventful train world`.

    Args:
        scale: factor on the number of steps.
        shard: most MiB of a file of a checkpoint.
    """
    phases = [phase.scaled(scale) for phase in PHASES[name]]
    options = LoopOptions(
        seconds=None if minutes is None else 60 * minutes, shard=shard * 2**20, save_every=500
    )
    with joined(device) as processes, _Bar(processes, quiet=as_json).shown() as bar:
        made = train_shipped(
            name, out, processes, phases=phases, options=options, on_step=bar.phase_step
        )
        if not processes.first:
            return
        score = (
            None if made is None else scored(made, VALIDATION[: max(1, round(384 * min(scale, 1)))])
        )
    result: dict[str, Any] = {"finished": made is not None, "score": score}
    if made is not None:
        result["model"] = str(out / f"{name}.safetensors")
    if as_json:
        print(json.dumps(result, indent=2))
    elif made is None:
        print(f"Time is over; start the command again to go on from {out}.")
    else:
        print(f"{score}; wrote {result['model']}")


def _loop_options(run: TrainingRun) -> LoopOptions:
    return LoopOptions(save_every=run.save_every, workers=run.workers)


def _on_problem(run: TrainingRun) -> OnProblem:
    """Stop at the first problem with the data, or collect them."""
    return stop if run.strict else Problems()


def _noted(problems: OnProblem) -> list[str]:
    """Messages of skipped problems; none if the first problem stops the run."""
    return [str(error) for error in problems.found] if isinstance(problems, Problems) else []


class _Bar:
    """A progress bar in the first process; silent where JSON is printed."""

    def __init__(self, processes: Processes, *, quiet: bool) -> None:
        self.quiet = quiet or not processes.first
        self.progress: Any = None
        self.tasks: dict[str, Any] = {}

    @contextmanager
    def shown(self) -> Iterator[_Bar]:
        """Show it while the block runs."""
        if self.quiet:
            yield self
            return
        from rich.console import Console
        from rich.progress import Progress, TimeRemainingColumn

        columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            self.progress = progress
            yield self

    def _set(self, name: str, text: str, done: int, count: int) -> None:
        if self.progress is None:
            return
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(text, total=count)
        self.progress.update(self.tasks[name], description=text, completed=done, total=count)

    def step(self, moment: StepProgress) -> None:
        """After a step of training."""
        text = f"epoch {moment.epoch + 1}, loss {moment.loss:.3f}"
        self._set("training", text, moment.step, moment.steps)

    def phase_step(self, phase: str, moment: StepProgress) -> None:
        """After a step of a phase of training."""
        self._set(phase, f"{phase}, loss {moment.loss:.3f}", moment.step, moment.steps)

    def caching(self, what: str, done: int, count: int) -> None:
        """After a video was cached."""
        self._set(what, f"caching {what}", done, count)


def _report(out: Path, as_json: bool, more: dict[str, Any]) -> None:
    """The last value of every scalar, and where the model is."""
    last = {row["name"]: float(row["value"]) for row in read(out / "scalars.csv")}
    result = {"model": str(out / "model.safetensors"), "last": last, **more}
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for name, value in last.items():
        print(f"{name:24} {value:.6g}")
    for score in more.get("scores", ()):
        r = "dense" if score["r"] is None else f"r = {score['r']}"
        print(f"{score['tuning']:6} {r:10} top-1 {score['top1']:.4f}  top-5 {score['top5']:.4f}")
    for line in more.get("skipped", ()):
        print(f"skipped {line}")
    print(f"wrote {result['model']}")
