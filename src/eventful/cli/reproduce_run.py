"""Runs `eventful reproduce NAME`: experiments on generated videos."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eventful.cli import evaluate_run
from eventful.cli.options import Evaluation
from eventful.errors import CheckpointError, ConfigError, MissingDependencyError
from eventful.paper import reproduce
from eventful.paper.evaluate.experiment import Experiment, load, world_names

RESULTS = Path("results")


def show_names(as_json: bool) -> None:
    """Print the names."""
    loaded = reproduce.experiments()
    if as_json:
        evaluate_run.print_experiments(loaded)
        return
    from rich.console import Console

    evaluate_run.print_list(loaded, lambda made: f"the model `{made.shipped}`")
    console = Console()
    console.print(
        "`eventful reproduce NAME` runs one, `eventful reproduce all` every one. Costs and memory "
        "from shapes alone: `eventful reproduce counts` and `memory`.",
        highlight=False,
    )


def run_one(
    name: str, data: Path | None, weights: Sequence[str], how: Evaluation, frames: int | None
) -> None:
    """`eventful reproduce NAME`."""
    made = load(name)
    if made.kind == "runtime":
        raise ConfigError(f"{name} measures times: that is `eventful bench runtime {name}`.")
    how = replace(how, out=how.out or RESULTS / made.name)
    evaluate_run.run_named(made, data, weights, how, frames=frames)


def run_all(
    data: Path | None,
    weights: Sequence[str],
    how: Evaluation,
    frames: int | None,
    only: Sequence[str] = (),
) -> None:
    """`eventful reproduce all`: those whose model is there; the others are named.

    Args:
        only: run these alone.
    """
    if how.as_json:
        raise ConfigError("--json is for one NAME; `all` writes results.json for each.")
    if data is not None:
        raise ConfigError("--data is for one NAME: not all of them take the same data.")
    for name in only or world_names():
        made = load(name)
        known = [entry for entry in weights if _belongs(entry, made)]
        try:
            reproduce.files_of(made, evaluate_run.weight_files(known))
        except CheckpointError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        placed = replace(how, out=(how.out or RESULTS) / name)
        try:
            evaluate_run.run_named(made, None, known, placed, frames=frames)
        except MissingDependencyError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)


def _belongs(entry: str, made: Experiment) -> bool:
    """Whether an experiment uses these weights; unnamed ones are the detector's."""
    name, equals, _ = entry.partition("=")
    return name in made.weights if equals else made.model == "vitdet"
