"""`eventful inspect`: a dry run of a conversion, and of the first steps of a stream."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
import typer

from eventful.cli.tables import Column, Grid, show
from eventful.modelspec.opening import open_named
from eventful.modelspec.size import both_sides, parse_size
from eventful.pipeline.first_step import refusal
from eventful.surgery.conversion import Inspection, inspect

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WAYS = {
    "resident": "on the device",
    "dense": "each frame dense",
    "host": "on the host",
}


def run(model: str, size: str | None, weights: str | None, dtype: str, as_json: bool) -> None:
    """Print which blocks match and what one stream would hold; exit with 1 if it cannot run."""
    given = parse_size(size)
    opened = open_named(model, weights=weights, size=given, weightless=True)
    shape = None if given is None else both_sides(given)
    module = opened.model.to(DTYPES[dtype])
    report = inspect(module, shape)
    refused = None
    if report.matched and report.size is not None:
        refused = refusal(module, report.size, shape)
    if as_json:
        print(json.dumps(_to_dict(model, dtype, report, refused), indent=2))
    else:
        _show(model, dtype, report, refused)
    if not report.matched or refused is not None:
        raise typer.Exit(1)


def _to_dict(model: str, dtype: str, report: Inspection, refused: str | None) -> dict[str, object]:
    return {
        "model": model,
        "dtype": dtype,
        "size": report.size,
        "tokens": sum(report.tokens.values()),
        "matched": report.matched,
        "blocks": [{**asdict(block), "matched": block.matched} for block in report.blocks],
        "refused": refused,
        "state_bytes": report.state_bytes,
        "on_gpu": report.on_gpu,
        "notes": report.notes,
    }


def _show(model: str, dtype: str, report: Inspection, refused: str | None) -> None:
    from rich.console import Console

    console = Console()
    if not report.blocks:
        console.print(
            f"[bold]{model}[/]: no known vision transformer inside. See docs/adapters.md."
        )
        return
    size = "x".join(str(side) for side in report.size or ())
    console.print(
        f"[bold]{model}[/] at {size} px, {dtype}: {report.matched} of {len(report.blocks)} blocks "
        f"can be made eventful ({report.blocks[0].adapter}), {sum(report.tokens.values())} tokens "
        "a frame."
    )
    misses = [block for block in report.blocks if not block.matched]
    if misses:
        console.print("Those that cannot:")
        for block in misses:
            line = f"  {block.name} ({block.type}): {block.reason}"
            console.print(line, markup=False, highlight=False)
    if refused is not None:
        line = f"A stream refuses its first frames, all the same: {refused}"
        console.print(line, markup=False, highlight=False)
        return
    grid = Grid(
        [Column("preset", names=True), Column("state per stream"), Column("steps on a GPU")],
        title="What one stream remembers",
    )
    for preset, count in report.state_bytes.items():
        grid.add([preset, f"{count / 1e6:,.1f} MB", _WAYS.get(report.on_gpu.get(preset, ""), "")])
    show(console, grid)
    for note in report.notes:
        console.print(f"On a GPU: {note}", markup=False, highlight=False)
