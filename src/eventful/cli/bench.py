"""`eventful bench`: what to measure, and how the rows are kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from eventful.bench.cases import SUBJECTS
from eventful.bench.measure import check, measure, state_needed
from eventful.bench.results import (
    append,
    origin,
    read_all,
    read_backbones,
    read_defaults,
    read_runtimes,
)
from eventful.bench.rows import Row, Setting
from eventful.bench.sweep import points
from eventful.cli import bench_tables
from eventful.cli.progress import counted, shown
from eventful.config import PRESETS
from eventful.errors import ConfigError, ParityError, UnsupportedError
from eventful.modelspec.size import Size

USUAL = {"cpu": "vitdet-b-672", "cuda": "vit-b-4096"}
SWEPT = {"cpu": "vit-s-576", "cuda": "vit-b-4096"}
QUICK = "vit-s-576"
TIMED = {"cpu": 12, "cuda": 40}  # steady frames
COMPARED = ("fast", "exact", "paper")
RESULTS = Path("benchmarks/results")


@dataclass(frozen=True)
class Plan:
    """The options of a benchmark; empty fields take their defaults."""

    models: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    r: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)
    frames: int = 0
    compiled: bool = True
    compile_mode: str = ""
    quick: bool = False
    weights: str | None = None
    size: Size | None = None

    def settings(self, usual: dict[str, str] = USUAL) -> Iterator[Setting]:
        """One run per model, device, dtype and batch, with all presets and budgets."""
        for device in self.devices:
            device_type = checked_device(device)
            named = self.models or ((QUICK,) if self.quick else (usual[device_type],))
            for model in named:
                for dtype in self.dtypes:
                    for batch in self.batches:
                        yield _fitting(
                            Setting(
                                model=model,
                                presets=_checked_presets(self.presets) or COMPARED,
                                r=self.r,
                                batch=batch,
                                device=device,
                                dtype=dtype,
                                frames=self.frames or (8 if self.quick else TIMED[device_type]),
                                compiled=self.compiled,
                                compile_mode=self.compile_mode,
                                weights=self.weights,
                                size=self.size or 0,
                            ),
                            free_to_drop=() if self.presets else ("paper",),
                        )


def run(plan: Plan, out: Path | None, as_json: bool) -> None:
    """Measure, print, and append to `out`."""
    made = []
    for setting in list(plan.settings()):
        rows = _measure(setting)
        where = origin(setting.device)
        made.append((rows, where))
        if out is not None:  # after each run: an interrupted benchmark keeps what it has
            append(out, rows, where)
    _report(made, out, as_json)


def sweep(
    plan: Plan, over: tuple[str, ...], values: tuple[int, ...], out: Path | None, as_json: bool
) -> None:
    """Vary one quantity after another; rows go to `sweep-<device>.csv` unless `out` is given."""
    if values and len(over) > 1:
        raise ConfigError("--value belongs to one axis: give --over once with it.")
    presets = plan.presets or ("fast", "exact")
    made, files = [], set()
    for base in list(replace(plan, presets=presets).settings(SWEPT)):
        path = out or RESULTS / f"sweep-{torch.device(base.device).type}.csv"
        for axis in over:
            for setting in points(axis, base, values):
                try:
                    rows = _measure(_fitting(setting, ()))
                except UnsupportedError as error:  # the largest points may not fit; keep the others
                    print(f"left out: {error}", file=sys.stderr)
                    continue
                where = origin(setting.device)
                made.append((rows, where))
                append(path, rows, where, over=axis)
                files.add(str(path))
    _report(made, ", ".join(sorted(files)), as_json)


def verify(plan: Plan, as_json: bool) -> None:
    """Only the parity checks that precede every measurement."""
    settings = list(plan.settings())
    for setting in settings:
        with _refusing(), _progress(setting) as tick:
            check(setting, tick)
    names = [
        {"model": s.model, "presets": s.presets, "device": s.device, "dtype": s.dtype}
        for s in settings
    ]
    if as_json:
        print(json.dumps(names, indent=2))
    else:
        for name in names:
            print(f"{name['model']}, {', '.join(name['presets'])}, {name['dtype']}: in parity")


def plot(results: Path, docs: Path, readme: Path) -> None:
    """Render pictures and tables from the CSV files into the docs and the README."""
    from eventful.bench import plots, tables
    from eventful.bench.video.table import read_videos, videos

    if not results.is_dir() or not any(results.glob("*.csv")):
        raise UnsupportedError(
            f"There are no results in {results}: measure with `eventful bench --out "
            f"{results}/NAME.csv`, or name another folder with --results."
        )
    runs, swept = read_all(results)
    made = plots.render(runs, swept, docs / "images")
    page = docs / "benchmarks.md"
    growth = [path for path in made if path.stem.startswith("growth-")]
    tables.put(page, tables.full(runs))
    tables.put(page, tables.pictures(growth, page), "growth")
    timed = read_runtimes(results)
    tables.put(page, tables.runtimes(timed, "table-2"), "runtime")
    tables.put(page, tables.runtimes(timed, "systems"), "systems")
    tables.put(page, tables.defaults(read_defaults(results)), "default")
    tables.put(page, videos(read_videos(results)), "video")
    tables.put(page, tables.backbones(read_backbones(results)), "backbone")
    tables.put(readme, tables.short(runs))
    if (results / "export").is_dir():
        from eventful.cli import bench_export

        bench_export.plot(results / "export", docs / "export.md")
    for path in (*made, page, readme):
        print(f"wrote {path}")


def show_models() -> None:
    """Print the names that can be measured."""
    for name, made in SUBJECTS.items():
        print(f"{name:16} {made.about}, r = {made.r} by default")


def _report(
    made: list[tuple[list[Row], dict[str, str]]], out: Path | str | None, as_json: bool
) -> None:
    if as_json:
        print(json.dumps([{**asdict(row), **where} for rows, where in made for row in rows]))
    else:
        bench_tables.show([row for rows, _ in made for row in rows], out)


def checked_device(device: str) -> str:
    """The kind of a device that is there and can be timed."""
    device_type = device.partition(":")[0]
    if device_type not in USUAL:
        raise UnsupportedError(f"{device!r} cannot be timed; give --device cpu or cuda.")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "No CUDA device here (`eventful doctor`); measure with --device cpu."
        )
    return device_type


def _checked_presets(presets: tuple[str, ...]) -> tuple[str, ...]:
    for preset in presets:
        if preset not in PRESETS:
            raise ConfigError(f"There is no preset {preset!r}; there are {', '.join(PRESETS)}.")
    return presets


def _fitting(setting: Setting, free_to_drop: tuple[str, ...]) -> Setting:
    """Refuse settings whose state would not fit into memory.

    Args:
        free_to_drop: presets not named by the user; left out if they do not fit.
    """
    needed = state_needed(setting)
    if setting.device.startswith("cuda"):
        free = torch.cuda.mem_get_info(torch.device(setting.device))[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = sum(needed.values())
    if total <= 0.9 * free:
        return setting
    for preset in free_to_drop:
        if total - needed.pop(preset) <= 0.9 * free:
            note = f"{preset} left out: too much state"
            return replace(setting, presets=tuple(needed), notes=(*setting.notes, note))
    raise UnsupportedError(
        f"{setting.model} with {', '.join(setting.presets)} at batch {setting.batch} keeps "
        f"{total / 1e9:.1f} GB of state, {free / 1e9:.1f} GB are free. Measure fewer presets "
        "(--preset) or budgets (--r) at a time, or a smaller model."
    )


def _measure(setting: Setting) -> list[Row]:
    with _refusing(), _progress(setting) as tick:
        return measure(setting, tick)


@contextmanager
def _refusing() -> Iterator[None]:
    """Exit with 1 on a wrong result; 2 is for wrong options."""
    try:
        yield
    except ParityError as error:
        print(str(error), file=sys.stderr)
        raise SystemExit(1) from None


@contextmanager
def _progress(setting: Setting) -> Iterator[Callable[[str], None]]:
    """On stderr: stdout belongs to the table."""
    name = f"{setting.model}, batch {setting.batch}, {setting.dtype} on {setting.device}"
    with shown(name) as report:
        yield lambda what: report(*counted(what))
