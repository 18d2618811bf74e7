"""`eventful cluster simulate`: what a cluster would do, from measured costs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eventful.cli.options import Json, grouped

if TYPE_CHECKING:
    from eventful.cluster.simulate.costs import Costs
    from eventful.cluster.simulate.fleet import Fleet
    from eventful.cluster.simulate.outcome import Outcome

_FOUND, _PICTURE = "simulation.json", "simulation.png"


@dataclass(frozen=True)
class Simulated:
    """Cameras and machines to simulate."""

    costs: Annotated[str, typer.Option(help="Measured costs, by name; --list shows them.")] = (
        "h200-vit-b-1024"
    )
    cameras: Annotated[int, typer.Option(min=1)] = 1000
    gpus: Annotated[int, typer.Option(min=1, help="Workers, each with one GPU.")] = 64
    fps: Annotated[float, typer.Option(min=0.01, help="Frames a second of each camera.")] = 25.0
    hours: Annotated[float, typer.Option(min=0.001, help="Simulated time.")] = 1.0
    missing: Annotated[
        float, typer.Option(min=0, max=1, help="Share of frames that may be missing, for sizing.")
    ] = 0.001
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=NUMBER", help="Another assumption; may be repeated."),
    ] = None
    seed: Annotated[int, typer.Option(min=0)] = 0


@grouped
def simulate(
    *,
    what: Simulated,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for JSON and a picture.")
    ] = None,
    known: Annotated[
        bool, typer.Option("--list", help="Show costs and assumptions, and simulate nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Simulate many cameras on many GPUs: frames lost, latency, load, recovery, GPUs needed.

    No cluster is needed. Times are fitted to stored measurements; the assumptions are printed.
    """
    from eventful.cluster.simulate.costs import Costs
    from eventful.cluster.simulate.fleet import Fleet

    fleet = replace(
        Fleet(), cameras=what.cameras, gpus=what.gpus, fps=what.fps, hours=what.hours,
        **_changed(what.change or ()),
    )  # fmt: skip
    if known:
        _list(fleet)
        return
    costs = Costs.measured(what.costs)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    found, dense, made = _simulated(fleet, costs, what)
    if out is not None:
        _write(out, made, found, dense)
    if as_json:
        print(json.dumps(made))
        return
    _show(found, dense, made)
    if out is not None:
        print(f"Numbers and picture: {out}")


def _simulated(
    fleet: Fleet, costs: Costs, what: Simulated
) -> tuple[Outcome, Outcome, dict[str, Any]]:
    """Both models on the same cluster, and all numbers as values for JSON."""
    from eventful.cli.progress import shown
    from eventful.cluster.simulate.run import gpus_needed
    from eventful.cluster.simulate.run import simulate as run

    with shown("simulating") as report:

        def one(name: str, own: Costs) -> Outcome:
            return run(fleet, own, what.seed, tick=lambda done, count: report(name, done, count))

        found, dense = one("eventful", costs), one("dense", costs.dense())
        report("GPUs needed")
        needed = {
            "eventful": gpus_needed(fleet, costs, what.missing, what.seed),
            "dense": gpus_needed(fleet, costs.dense(), what.missing, what.seed),
        }
    beside = dense.to_dict()
    made = {
        **found.to_dict(),
        "dense": {key: beside[key] for key in ("frames", "latency_ms", "utilisation")},
        "gpus_needed": {"missing_share_at_most": what.missing, **needed},
    }
    return found, dense, made


def _changed(given: Any) -> dict[str, Any]:
    """`NAME=NUMBER`, as fields of a `Fleet`."""
    from eventful.cluster.simulate.fleet import Fleet
    from eventful.errors import ConfigError

    kinds = {
        name: type(value)
        for name, value in vars(Fleet()).items()
        if isinstance(value, int | float) and name not in ("cameras", "gpus", "fps", "hours")
    }
    changed: dict[str, Any] = {}
    for entry in given:
        name, _, number = entry.partition("=")
        if name not in kinds:
            raise ConfigError(f"--set {name}: no such assumption; there are {', '.join(kinds)}.")
        try:
            changed[name] = kinds[name](number)
        except ValueError:
            raise ConfigError(f"--set {entry}: give a number, as in {name}=2.") from None
    return changed


def _list(fleet: Any) -> None:
    from eventful.cluster.simulate.costs import Costs, names
    from eventful.cluster.simulate.fleet import ASSUMPTIONS

    for name in names():
        found = Costs.measured(name)
        print(
            f"{name}: {found.fixed:.3g} ms a step + {found.per_stream:.3g} ms a frame + "
            f"{1000 * found.per_token:.3g} ms for 1,000 tokens, at most {found.most} frames; "
            f"within {found.gap:.0%} of {found.source}"
        )
    for name, value in fleet.to_dict().items():
        print(f"{name} = {value}")
    for text in ASSUMPTIONS:
        print(f"- {text}")


def _write(out: Path, made: dict[str, Any], found: Outcome, dense: Outcome) -> None:
    from eventful import files
    from eventful.bench.results import origin
    from eventful.cluster.simulate.picture import draw

    files.write_json(out / _FOUND, {**origin("cpu"), **made})
    draw(found, dense, out / _PICTURE)


def _show(found: Outcome, dense: Outcome, made: dict[str, Any]) -> None:
    from rich.console import Console

    from eventful.cli.tables import Column, Grid, show
    from eventful.cluster.simulate.fleet import ASSUMPTIONS

    fleet, needed = found.fleet, made["gpus_needed"]
    title = f"{fleet.cameras:,} cameras at {fleet.fps:g} frames/s on {fleet.gpus} GPUs, "
    title += f"{fleet.hours:g} h, seed {found.seed}"
    grid = Grid(
        [Column("", names=True), Column("eventful"), Column("dense")],
        title=title,
        caption=f"times within {found.costs.gap:.0%} of {found.costs.source}",
    )
    both = (found.to_dict(), dense.to_dict())
    for label, cells in {
        "frames sent": [f"{one['frames']['sent']:,}" for one in both],
        "dropped, a newer one came": [f"{one['frames']['dropped']:,}" for one in both],
        **{
            f"lost: {cause}": [f"{one['frames']['lost'][cause]:,}" for one in both]
            for cause in both[0]["frames"]["lost"]
        },
        "missing": [f"{one['frames']['missing_share']:.4%}" for one in both],
        "latency p50, ms": [f"{one['latency_ms']['p50']:.0f}" for one in both],
        "latency p99, ms": [f"{one['latency_ms']['p99']:.0f}" for one in both],
        "GPU time in use, mean": [f"{one['utilisation']['mean']:.0%}" for one in both],
        "GPU time in use, highest": [f"{one['utilisation']['highest']:.0%}" for one in both],
        "longest recovery, s": [f"{one['recovery_s']['longest']:.1f}" for one in both],
        "GPU seconds for computed frames": [f"{one['gpu_seconds']:,.0f}" for one in both],
        f"GPUs for {needed['missing_share_at_most']:.2%} missing": [
            str(needed[name]) if needed[name] else f"over {fleet.cameras:,}"
            for name in ("eventful", "dense")
        ],
    }.items():
        grid.add([label, *cells])
    console = Console()
    show(console, grid)
    happened = ", ".join(f"{count} {what}" for what, count in sorted(found.events.items()))
    console.print(f"Failures: {happened or 'none'}.", highlight=False)
    console.print(
        f"CPU cores to decode: {made['cores_to_decode']:.0f} ({fleet.decode:g} ms a frame, an "
        "assumption).",
        highlight=False,
    )
    console.print("Assumptions (`--list` has every number):", highlight=False)
    for text in ASSUMPTIONS:
        console.print(f"- {text}", highlight=False)
