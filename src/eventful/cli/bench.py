"""`eventful bench`: what to measure, and how the rows are shown and kept."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from eventful.bench.cases import SUBJECTS
from eventful.bench.measure import Row, Setting, measure, state_needed
from eventful.bench.results import append, origin
from eventful.config import PRESETS
from eventful.errors import ConfigError, UnsupportedError

QUICK = {"models": ("vit-s-576",), "presets": ("fast", "exact", "paper")}
DEFAULT = {"models": ("vitdet-b-672",), "presets": ("fast", "exact", "paper")}


@dataclass(frozen=True)
class Plan:
    """What was asked for; empty fields take their defaults."""

    models: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    r: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    device: str = "cpu"
    dtype: str = "float32"
    frames: int = 12
    compiled: bool = True
    quick: bool = False

    def settings(self) -> Iterator[Setting]:
        """One run per model and batch size; presets and budgets meet within a run."""
        usual = QUICK if self.quick else DEFAULT
        presets = self.presets or usual["presets"]
        for preset in presets:
            if preset not in PRESETS:
                known = ", ".join(PRESETS)
                raise ConfigError(f"There is no preset {preset!r}; there are {known}.")
        for model in self.models or usual["models"]:
            for batch in self.batches:
                yield Setting(
                    model=model,
                    presets=presets,
                    r=self.r,
                    batch=batch,
                    device=self.device,
                    dtype=self.dtype,
                    frames=self.frames,
                    compiled=self.compiled and not self.quick,
                )


def run(plan: Plan, out: Path | None, as_json: bool) -> None:
    """Measure, print, and append to `out`."""
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError(
            "No CUDA device here (`eventful doctor`); measure with --device cpu."
        )
    rows: list[Row] = []
    for setting in list(plan.settings()):
        _check_memory(setting)
        made = _measure(setting, quiet=as_json)
        rows += made
        if out is not None:  # after each run: an interrupted benchmark keeps what it has
            append(out, made, origin(setting.device))
    if as_json:
        where = origin(plan.device)
        print(json.dumps([{**asdict(row), **where} for row in rows], indent=2))
    else:
        _show(rows, out)


def _check_memory(setting: Setting) -> None:
    """Refuse what would not fit, before an hour is spent on it."""
    needed = state_needed(setting)
    if setting.device.startswith("cuda"):
        free = torch.cuda.mem_get_info(torch.device(setting.device))[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > 0.9 * free:
        raise UnsupportedError(
            f"{setting.model} with {', '.join(setting.presets)} at batch {setting.batch} keeps "
            f"{needed / 1e9:.1f} GB of state, {free / 1e9:.1f} GB are free. Measure fewer presets "
            "(--preset) or a smaller model at a time."
        )


def _measure(setting: Setting, *, quiet: bool) -> list[Row]:
    if quiet:
        return measure(setting)
    from rich.console import Console

    with Console().status(setting.model) as status:
        return measure(setting, lambda what: status.update(f"{setting.model}: {what}"))


def show_models() -> None:
    """Print the names that can be measured."""
    for name, made in SUBJECTS.items():
        print(f"{name:16} {made.about}, r = {made.r} by default")


def _by_run(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    runs: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        runs.setdefault((row.model, row.batch), []).append(row)
    return runs


def _show(rows: Sequence[Row], out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for (model, batch), run_rows in _by_run(rows).items():
        first = run_rows[0]
        table = Table(
            title=f"{model}, {first.tokens} tokens, batch {batch}, {first.dtype} on {first.device}",
            caption=f"dense at its best: {first.dense_best_ms:.3g} ms ({first.dense_best})",
        )
        table.add_column("preset")
        for title in ("r", "speed-up", "fewer operations", "error", "skip error", "state"):
            table.add_column(title, justify="right")
        for row in run_rows:
            table.add_row(
                row.preset,
                str(row.r),
                f"{row.speedup:.2f}x",
                f"{1 / row.macs_ratio:.1f}x",
                f"{row.feature_error:.3f}",
                f"{row.skip_error:.3f}",
                f"{row.state_bytes / 1e6:,.0f} MB",
            )
        console.print(table)
    console.print(
        "Medians over steady frames, every contender in turn on each frame. Speed-up: against the "
        "fastest dense path. Error: of the output against dense; skip error: of the dense model on "
        "every k-th frame, at equal operations."
    )
    if out is not None:
        console.print(f"Rows appended to {out}")
