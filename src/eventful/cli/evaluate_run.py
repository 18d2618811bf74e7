"""Runs `eventful evaluate`: builds an experiment from options and prints its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from eventful.cli.options import Dtype, Evaluated, Evaluation
from eventful.cli.progress import Report as Shown
from eventful.cli.progress import shown
from eventful.cli.tables import Column, Grid, show
from eventful.errors import ConfigError, UnsupportedError
from eventful.models.shipped import named_or_file
from eventful.paper.evaluate import experiment as experiments
from eventful.paper.evaluate.evaluation import Progress, Settings
from eventful.paper.evaluate.experiment import Experiment
from eventful.paper.evaluate.report import METRICS, Report, Row, Scale
from eventful.paper.evaluate.runtime import Plan, measure_runtime
from eventful.paper.evaluate.variants import BASE, DENSE, SKIP, Variant
from eventful.paper.reproduce import files_of, measure, source_of
from eventful.remote.session import LOCAL

LABELS = {DENSE: "Base model", "paper": "paper"}
ACCURACIES = {"vitdet": ("coco_map50", "fgfa_map50"), "vivit": ("top1", "top5")}
VIEWS = "4x3"  # temporal x spatial, as in the paper


def experiment_from_options(
    model: str,
    presets: Sequence[str] | None,
    budgets: Sequence[str] | None,
    thresholds: Sequence[float] | None,
    size: int | None,
) -> Experiment:
    """The experiment that options on the command line describe."""
    policies: list[dict[str, Any]] = [_budget(text) for text in budgets or ()]
    policies += [{"h": h} for h in thresholds or ()]
    policies = [policy for i, policy in enumerate(policies) if policy not in policies[:i]]
    variants: list[Variant] = []
    names = list(dict.fromkeys(presets or (DENSE,)))
    if policies and names == [DENSE]:
        raise ConfigError("--r and --h are for eventful models: name one, such as --preset paper.")
    for preset in names:
        if preset == SKIP:
            continue
        if preset == DENSE:
            variants.append(Variant(LABELS[DENSE], DENSE, model, size))
            continue
        for policy in policies or [{}]:
            variants.append(Variant(preset, preset, model, size, **policy))
    if SKIP in names:
        alike = experiments.skips(None, variants)
        alone = [Variant("Frame skipping", SKIP, model, size, **policy) for policy in policies]
        if not alike and not alone:
            raise ConfigError(
                "--preset skip runs dense on some frames only: give its cost, with --r or "
                "beside another preset."
            )
        variants += alike or alone
    metric = ACCURACIES[model][0]
    return Experiment(f"evaluate-{model}", _title(model), tuple(variants), model, metric=metric)


def load_experiment(name: str, skip: bool) -> Experiment:
    """An experiment by name, on request with frame skipping for each variant."""
    made = experiments.load(name)
    if not skip:
        return made
    return replace(made, variants=(*made.variants, *experiments.skips(None, list(made.variants))))


def run_options(
    model: str,
    what: Evaluated,
    how: Evaluation,
    *,
    frames: int | None = None,
    views: str = VIEWS,
) -> None:
    """`eventful evaluate vitdet` and `vivit`."""
    chosen = settings(what.data, what.weights, how, size=what.size, frames=frames, views=views)
    run(experiment_from_options(model, what.preset, what.r, what.h, what.size), chosen, how.as_json)


def run_named(
    made: Experiment,
    data: Path | None,
    weights: Sequence[str],
    how: Evaluation,
    *,
    frames: int | None = None,
    views: str = VIEWS,
) -> None:
    """`eventful evaluate run`."""
    if made.kind == "runtime":
        plan = runtime_plan(weights, how.device, how.dtype, frames, views)
        run_runtime(made, plan, how.out, how.as_json)
        return
    if data is None and not made.source:
        raise ConfigError(f"{made.name} needs --data: {made.data}.")
    if data is None:
        data = Path(source_of(made, device=how.device, videos=how.videos, frames=frames))
        how = replace(how, split=how.split or made.split or None)
    if made.views and views == VIEWS:
        views = made.views
    chosen = settings(data, weights, how, frames=frames, views=views)
    run(made, replace(chosen, weights=files_of(made, chosen.weights)), how.as_json)


def settings(
    data: Path,
    weights: Sequence[str],
    how: Evaluation,
    *,
    size: int | None = None,
    frames: int | None = None,
    views: str = VIEWS,
) -> Settings:
    """Options as settings."""
    _check_device(how.device, how.dtype, elsewhere=how.ray_address is not None)
    own = ("as_json", "ray", "ray_address")
    shared = {name: value for name, value in vars(how).items() if name not in own}
    return Settings(
        ray=how.ray_address or (LOCAL if how.ray else None),
        data=data,
        weights=weight_files(weights),
        size=size,
        frames=frames,
        views=_views(views),
        **shared,
    )


def run(made: Experiment, chosen: Settings, as_json: bool) -> None:
    """Evaluate, and print the report."""
    try:
        with _progress() as progress:
            report = measure(made, chosen, progress)
    except KeyboardInterrupt:
        kept = "without --out nothing is kept"
        if chosen.out is not None:
            kept = (
                f"{chosen.out} keeps the videos that are done, and the same command resumes there"
            )
        print(f"Stopped: {kept}.", file=sys.stderr)
        raise SystemExit(130) from None
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    _show(report, chosen.out)


def runtime_plan(
    weights: Sequence[str],
    device: str,
    dtype: str,
    frames: int | None,
    views: str,
    *,
    streams: int = 1,
    compiled: bool = True,
    compile_mode: str = "",
) -> Plan:
    """Options as a plan for timing."""
    _check_device(device, dtype)
    given, files = _views(views), weight_files(weights)
    return Plan(device, dtype, frames or 0, given, streams, compiled, compile_mode, files)


def only_variants(made: Experiment, model: str | None, size: int | None) -> Experiment:
    """Only the variants of one model or size, of an experiment that times them."""
    if made.kind != "runtime":
        raise ConfigError(
            f"{made.name} measures {made.kind}: that is `eventful evaluate run {made.name}`."
        )
    kept = [v for v in made.variants if model in (None, v.model) and size in (None, v.size)]
    if not kept:
        there = sorted({f"{v.model} at {v.size}" for v in made.variants})
        raise ConfigError(f"{made.name} times only {', '.join(there)}; change --model or --size.")
    return replace(made, variants=tuple(kept))


def run_runtime(made: Experiment, plan: Plan, out: Path | None, as_json: bool) -> None:
    """Time an experiment of kind `runtime`."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # fail now, not after an hour
    keep = (lambda report: report.write(out)) if out is not None else (lambda _: None)
    with _progress() as progress:
        report = measure_runtime(made, plan, progress, keep)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    _show(report, out)


def print_experiments(loaded: Sequence[Experiment]) -> None:
    """Print experiments as JSON."""
    rows = [
        {
            **{k: v for k, v in asdict(made).items() if k != "variants"},
            "weights": list(made.weights),
            "variants": [variant.key for variant in made.variants],
        }
        for made in loaded
    ]
    print(json.dumps(rows, indent=2))


def show_experiments(as_json: bool) -> None:
    """Print the experiments of the package."""
    loaded = [experiments.load(name) for name in experiments.names()]
    if as_json:
        print_experiments(loaded)
        return
    print_list(loaded, lambda made: made.data)


def print_list(loaded: Sequence[Experiment], needs: Callable[[Experiment], str]) -> None:
    """Print experiments by name: what each shows, where it is in the paper, what it needs."""
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what", box=None, pad_edge=False)
    for made in loaded:
        count = f"{len(made.variants)} variant{'s' * (len(made.variants) != 1)}"
        where = f"{made.paper}; {count}; needs {needs(made)}"
        table.add_row(made.name, f"{made.title}\n[dim]{where.replace('needs none', 'none')}[/]")
    Console().print(table, highlight=False)


def _title(model: str) -> str:
    return {"vitdet": "ViTDet", "vivit": "ViViT"}[model]


def _budget(text: str) -> dict[str, Any]:
    """`768` or `12%` as the field of a variant."""
    number = text.strip()
    try:
        if number.endswith("%"):
            return {"fraction": float(number[:-1]) / 100}
        return {"r": int(number)}
    except ValueError:
        raise ConfigError(
            f"--r is a number of tokens or a percentage, 768 or 12%: {text!r}."
        ) from None


def weight_files(given: Sequence[str]) -> dict[str, Path]:
    """`NAME=FILE` and plain files, by name."""
    files: dict[str, Path] = {}
    for entry in given:
        name, equals, path = entry.partition("=")
        key = name if equals else BASE
        if key in files:
            raise ConfigError(f"--weights {key} is given twice; name them, as in r200=FILE.")
        files[key] = named_or_file(Path(path if equals else entry))
    return files


def _views(text: str) -> tuple[int, int]:
    temporal, _, spatial = text.partition("x")
    if not (temporal.isdigit() and spatial.isdigit() and int(temporal) and int(spatial)):
        raise ConfigError(f"--views is temporal x spatial, such as 4x3: {text!r}.")
    return int(temporal), int(spatial)


def _check_device(device: str, dtype: str, *, elsewhere: bool = False) -> None:
    device_type, _, number = device.partition(":")
    if device_type not in ("cpu", "cuda") or not (number == "" or number.isdigit()):
        raise ConfigError(f"--device is cpu, cuda or cuda:0 and so on: {device!r}.")
    if device_type == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise UnsupportedError("No CUDA device here (`eventful doctor`); use --device cpu.")
    if device_type == "cuda" and not elsewhere and int(number or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"There is no {device}; GPUs found: {torch.cuda.device_count()}.")
    if dtype not in tuple(Dtype):
        raise ConfigError(f"--dtype is one of {', '.join(Dtype)}: {dtype!r}.")


@contextmanager
def _progress() -> Iterator[Progress]:
    """On stderr: stdout belongs to the report."""
    with shown(unit="frames") as report:
        yield _Variants(report)


class _Variants:
    """Progress of an evaluation: one stage for each variant."""

    def __init__(self, report: Shown) -> None:
        self._report = report
        self._stage, self._done, self._count = "", 0, 0

    def stage(self, what: str) -> None:
        self._report(what)

    def begin(self, variant: Variant, frames: int, videos: int) -> None:
        several = "video" if videos == 1 else "videos"
        self._stage, self._done, self._count = f"{variant.key} ({videos} {several})", 0, frames
        self._report(self._stage, 0, frames)

    def advance(self, frames: int) -> None:
        self._done += frames
        self._report(self._stage, self._done, self._count)


def _show(report: Report, out: Path | None) -> None:
    from rich.console import Console

    console = Console()
    made = report.experiment
    columns = _runtime_columns() if made.kind == "runtime" else _columns(report)
    grid = Grid(
        [Column(name, names=side == "left") for name, side, _ in columns],
        title=f"{made.title} ({made.paper})" if made.paper else made.title,
    )
    group = ""
    for row in report.rows:
        if made.kind == "runtime" and group != (group := f"{row.model} {row.size}"):
            grid.add([group, *[""] * (len(columns) - 1)], "bold")
        grid.add([cell(row) for _, _, cell in columns])
    if report.rows:
        show(console, grid, spare=["paper"] if made.kind == "runtime" else [])
    for name, value in report.statistics.items():
        shown = f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
        if name.startswith("error"):
            shown = f"{value:.3g}"
        console.print(f"{name.replace('_', ' '):28} {shown}", highlight=False)
    for key, why in report.left_out.items():
        console.print(f"left out: {key}, {why}", highlight=False, markup=False)
    if report.problems:
        console.print(
            f"{len(report.problems)} problems with the data, left out; results.json has them"
        )
    if made.remark:
        console.print(made.remark, highlight=False, markup=False)
    if out is not None:
        console.print(f"Results: {out}", highlight=False, markup=False)


Columns = list[tuple[str, Any, Any]]


def _columns(report: Report) -> Columns:
    made = report.experiment
    columns: Columns = [("variant", "left", _label), ("size", "right", lambda row: _n(row.size))]
    columns.append(("r", "right", _policy))
    for name in ACCURACIES[made.model]:
        columns.append((f"{METRICS[name]} (%)", "right", lambda row, n=name: _f(getattr(row, n))))
        if name == made.metric:
            columns.append(("paper", "right", lambda row: _f(row.published_accuracy) or row.remark))
    scale = Scale.of(made.model, report.rows)
    columns.append((scale.name, "right", lambda row: _operations(row.operations, scale)))
    columns.append(("paper", "right", lambda row: _operations(row.published_operations, scale)))
    columns.append(("saved", "right", lambda row: _f(row.saving, 1, "x")))
    if not any(row.published_accuracy or row.published_operations for row in report.rows):
        columns = [column for column in columns if column[0] != "paper"]
    return columns


def _runtime_columns() -> Columns:
    """Milliseconds, how many times faster than dense in the same run, the paper's milliseconds."""
    return [
        ("", "left", lambda row: row.label if row.r is None else f"{row.label}, r {row.r}"),
        ("first", "right", lambda row: _f(row.first_ms, 1)),
        ("ms", "right", lambda row: _f(row.ms, 1)),
        ("total", "right", lambda row: _f(row.total_ms, 1)),
        ("fastest", "right", lambda row: _f(row.speedup, 2, "x")),
        ("total", "right", lambda row: _f(row.total_speedup, 2, "x")),
        ("queued", "right", lambda row: _f(row.pipelined_speedup, 2, "x")),
        ("base", "right", lambda row: _f(row.base_speedup, 2, "x")),
        ("paper", "right", _published_times),
    ]


def _published_times(row: Row) -> str:
    return ", ".join(_f(ms, 0) for ms in (row.published_gpu_ms, row.published_cpu_ms) if ms)


def _operations(value: float | None, scale: Scale) -> str:
    return _f(None if value is None else value * scale.factor, scale.digits)


def _label(row: Row) -> str:
    text = row.label if row.tuned_r is None else f"{row.label}, tuned at {row.tuned_r}"
    return text if row.share is None else f"{text} ({row.share:.1%} of frames)"


def _policy(row: Row) -> str:
    if row.h is not None:
        return f"h = {row.h:g}"
    if row.per_gate is not None:
        return f"{row.per_gate:.1%} per gate"
    return f"{row.fraction:.1%}" if row.fraction is not None else _n(row.r)


def _n(value: int | None) -> str:
    return "" if value is None else str(value)


def _f(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"
