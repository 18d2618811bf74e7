"""Results as Markdown tables, written between the markers of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eventful.bench.results import Record
from eventful.errors import UnsupportedError

_ORDER = ("fast", "exact", "paper", "tokenwise", "stgt")
_SHORT_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def put(page: Path, text: str, name: str = "bench") -> None:
    """Replace the text between `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    old = page.read_text() if page.exists() else ""
    before, found_begin, rest = old.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise UnsupportedError(
            f"{page} has no lines {begin.strip()} and {end}: add them where the table belongs, or "
            "run from the root of the repository."
        )
    page.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")


def full(records: Sequence[Record]) -> str:
    """Every row, by machine."""
    parts = []
    for where, group in by_machine(records).items():
        versions = sorted({f"torch {record['torch']}" for record in group})
        parts += [f"### {where}", "", f"*{', '.join(versions)}*", ""]
        parts += [_table(group, _FULL), ""]
    return "\n".join(parts)


def short(records: Sequence[Record]) -> str:
    """The rows of `fast` and `exact`, in few columns."""
    wanted = [record for record in records if record["preset"] in ("fast", "exact")]
    parts = []
    for where, group in by_machine(wanted).items():
        parts += [f"**{where}**", "", _table(group, _SHORT), ""]
    return "\n".join(parts)


def runtimes(reports: Sequence[dict[str, Any]], experiment: str) -> str:
    """Times of the systems of one experiment, by machine, of the reports of `bench runtime`."""
    groups: dict[str, list[str]] = {}
    chosen = [report for report in reports if report["experiment"] == experiment]
    for report in sorted(chosen, key=lambda report: report["settings"]["device"] == "cpu"):
        where, settings = report["origin"], report["settings"]
        device = {"device": settings["device"], **where}
        dtype = _SHORT_DTYPE.get(settings["dtype"], settings["dtype"])
        title = f"### {machine(device)}, {dtype}"
        lines = groups.setdefault(title, [])
        rows = report["rows"]
        paper = f"published_{'cpu' if settings['device'] == 'cpu' else 'gpu'}_ms"
        base = {(r["model"], r["size"]): r[paper] for r in rows if r["label"] == "Base model"}
        views = math.prod(settings["views"])
        for row in rows:
            published = base.get((row["model"], row["size"]))
            several = views if row["model"] == "vivit" else settings.get("streams", 1)
            lines.append(_runtime(row, several, published, paper))
        lines.append(_origin(report))
    parts = []
    for title, lines in groups.items():
        notes = [line for line in lines if line.startswith("*")]
        table = [line for line in lines if line not in notes]
        parts += [title, "", *_RUNTIME_HEAD, *table, "", *(f"{note}  " for note in notes), ""]
    return "\n".join(parts) or "*Nothing is measured yet: `eventful bench runtime`.*"


def _origin(report: dict[str, Any]) -> str:
    """A line about one report: how long the dense paths took in their trials, and its commit."""
    where, rows = report["origin"], report["rows"]
    systems = {f"{_SYSTEMS[row['model']]} {row['size']}": None for row in rows}
    streams = report["settings"].get("streams", 1)
    title = ", ".join(systems) + (f", {streams} streams" if streams > 1 else "")
    found = report["detail"].get("dense_paths", {})
    trials = "; ".join(
        f"{name}: {text.removeprefix('trials: ')}"
        for name, text in found.items()
        if not name.startswith("base-model")  # the rows say the same
    )
    told = f" Trials of the dense paths: {trials}." if trials else ""
    return f"*{title}: torch {where['torch']}, commit {where['commit']}.{told}*"


_RUNTIME_HEAD = (
    "| system | variant | first frame | transformer | total | transformer, against the fastest "
    "dense | total, against the fastest dense | the same, frames queued "
    "| transformer, against the base model | in the paper |",
    "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def _runtime(row: dict[str, Any], several: int, base: float | None, paper: str) -> str:
    system = f"{_SYSTEMS[row['model']]} {row['size']}"
    if row["model"] == "vivit":
        system += f", {several} view" + "s" * (several > 1)
    elif several > 1:
        system += f", {several} streams"
    variant = row["label"] if row["r"] is None else f"{row['label']}, r = {row['r']}"
    # All steps of a video at once have no first one.
    together = row["model"] == "vivit" and row["label"].startswith("Base model, ")
    cells = [
        system,
        variant,
        "" if together else _milliseconds(row["first_ms"]),
        *(_milliseconds(row[name]) for name in ("ms", "total_ms")),
        *(f"{row[name]:.2f}x" for name in ("speedup", "total_speedup")),
        f"{row['pipelined_speedup']:.2f}x" if row.get("pipelined_speedup") else "",
        f"{row['base_speedup']:.2f}x",
        f"{base / row[paper]:.2f}x" if base and row[paper] else "",
    ]
    return f"| {' | '.join(cell or '–' for cell in cells)} |"


_SYSTEMS = {"vitdet": "ViTDet-B", "vivit": "ViViT-B"}


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def defaults(records: Sequence[dict[str, Any]]) -> str:
    """The default settings on real clips, and dense steps of streams, by machine and precision."""
    parts: list[str] = []
    for record in sorted(records, key=lambda record: not record["cuda"]):
        device = {"device": "cuda" if record["cuda"] else "cpu", **record}
        dtype = _SHORT_DTYPE.get(record["dtype"], record["dtype"])
        dtype += ", TF32" if record["tf32"] else ""
        parts += [
            f"### {machine(device)}, {dtype}, {record['size'].replace('x', ' x ')} pixels",
            "",
        ]
        if record["clips"]:
            parts += [*_DEFAULT_HEAD, *map(_clip, record["clips"]), ""]
        for flush in record["flushes"]:
            line = (
                f"A dense step under `{flush['preset']}` takes {flush['ratio']:.2f}x the model's "
                f"own forward ({flush['against']})"
            )
            if record["cuda"]:
                line += f", {flush['ratio_in_flight']:.2f}x with frames in flight"
            parts += [f"{line}.", ""]
        parts += [f"*torch {record['torch']}, commit {record['commit']}*", ""]
    return "\n".join(parts) or "*Nothing is measured yet: `benchmarks/default.py`.*"


_DEFAULT_HEAD = (
    "| clip | tokens updated | dense at its best | the default | time, against dense "
    "| dense steps | feature error, median / worst |",
    "|---|--:|--:|--:|--:|--:|--:|",
)


def _clip(row: dict[str, Any]) -> str:
    best = row["dense_best"]
    cells = (
        row["clip"],
        f"{row['updated']:.0%}",
        f"{_milliseconds(row['dense_ms'][best])} ({best})",
        _milliseconds(row["ms"]),
        f"{row['ratio']:.2f}x",
        f"{row['dense_steps']} of {row['frames'] - 1}",
        f"{row['error_median']:.3f} / {row['error_worst']:.3f}",
    )
    return f"| {' | '.join(cells)} |"


def backbones(records: Sequence[dict[str, Any]]) -> str:
    """ViTDet's backbone with frames in flight."""
    parts: list[str] = []
    for record in records:
        dtype = _SHORT_DTYPE.get(record["dtype"], record["dtype"])
        parts += [f"### {machine({'device': 'cuda', **record})}, {dtype}", "", *_BACKBONE_HEAD]
        for row in record["settings"]:
            flight = dict(row["in_flight_ms"])
            own = flight.pop("eventful")
            best = min(flight, key=lambda name: flight[name])
            parts.append(
                f"| ViTDet-B {row['size']} | {row['r']} | {_milliseconds(own)} "
                f"| {_milliseconds(flight[best])} ({best}) | {flight[best] / own:.2f}x "
                f"| {_milliseconds(row['ms']['eventful'])} |"
            )
        parts += ["", f"*torch {record['torch']}, commit {record['commit']}*", ""]
    return "\n".join(parts) or "*Nothing is measured yet: `benchmarks/backbone.py`.*"


_BACKBONE_HEAD = (
    "| backbone | r | `fast`, in flight | dense at its best, in flight | speed-up "
    "| `fast`, one frame at a time |",
    "|---|--:|--:|--:|--:|--:|",
)


def pictures(paths: Sequence[Path], page: Path) -> str:
    """Links from a page to its pictures of growth."""
    lines = []
    for path in paths:
        lines += [f"![{caption(path)}]({path.relative_to(page.parent).as_posix()})", ""]
    return "\n".join(lines) or "*No sweep is measured yet: `eventful bench sweep`.*"


def caption(path: Path) -> str:
    """What a picture of growth shows, from its name."""
    return f"How time grows: {path.stem.removeprefix('growth-')}"


def by_machine(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Rows by the machine they come from, GPUs first, each group in order of model and preset."""
    groups: dict[str, list[Record]] = {}
    ordered = sorted(records, key=lambda record: (record["device"] == "cpu", *_place(record)))
    for record in ordered:
        groups.setdefault(machine(record), []).append(record)
    return groups


def machine(record: Record) -> str:
    """The device, and for a CPU its threads."""
    threads = f", {record['threads']} threads" if record["device"] == "cpu" else ""
    return f"{record['device_name']}{threads}"


def _place(record: Record) -> tuple[object, ...]:
    preset = record["preset"]
    return (
        machine(record),
        record["model"],
        record["dtype"],
        int(record["batch"]),
        int(record["depth"] or 0),
        int(record["r"]),
        _ORDER.index(preset) if preset in _ORDER else len(_ORDER),
    )


def _table(records: Sequence[Record], columns: dict[str, Callable[[Record], str]]) -> str:
    lines = [
        f"| {' | '.join(columns)} |",
        f"|{'|'.join('---' if name in _TEXT else '--:' for name in columns)}|",
    ]
    lines += [
        f"| {' | '.join(show(record) or '–' for show in columns.values())} |" for record in records
    ]
    return "\n".join(lines)


def number(record: Record, name: str) -> float | None:
    """A value of a row; None where the file has none."""
    text = record.get(name) or ""
    return float(text) if text else None


def _ms(name: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        value = number(record, name)
        return "" if value is None else _milliseconds(value)

    return show


def _times(name: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        value = number(record, name)
        return "" if value is None else f"{value:.2f}x"

    return show


def _bytes(name: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        value = number(record, name)
        return "" if value is None else f"{value / 1e6:,.0f} MB"

    return show


def _column(name: str) -> Callable[[Record], str]:
    return lambda record: record.get(name) or ""


def _fewer_operations(record: Record) -> str:
    ratio = number(record, "macs_ratio")
    return f"{1 / ratio:.1f}x" if ratio else ""


def _dense(record: Record) -> str:
    return f"{_ms('dense_best_ms')(record)} ({record['dense_best']})"


def _speedup(record: Record) -> str:
    return f"**{_times('speedup')(record)}**"


def _shape(record: Record) -> str:
    return f"{record['r']} / {record['tokens']}"


def _error(name: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        value = number(record, name)
        return "" if value is None else f"{value:.3f}"

    return show


def _skipping(record: Record) -> str:
    error = _error("skip_error")(record)
    return f"{error} (every {record['skip_every']})" if error else ""


def _dtype(record: Record) -> str:
    return _SHORT_DTYPE.get(record["dtype"], record["dtype"])


_TEXT = {"model", "type", "preset", "dense at its best", "commit"}
_SHORT: dict[str, Callable[[Record], str]] = {
    "model": _column("model"),
    "type": _dtype,
    "streams": _column("batch"),
    "r / tokens": _shape,
    "preset": _column("preset"),
    "dense at its best": _dense,
    "eventful": _ms("ms"),
    "speed-up": _speedup,
    "pipelined": _times("speedup_pipelined"),
    "fewer operations": _fewer_operations,
}
_FULL: dict[str, Callable[[Record], str]] = {
    **_SHORT,
    "dense eager": _ms("dense_eager_ms"),
    "paper": _ms("paper_ms"),
    "flush": _ms("flush_ms"),
    "error": _error("feature_error"),
    "skipping": _skipping,
    "peak": _bytes("peak_bytes"),
    "dense peak": _bytes("dense_peak_bytes"),
    "state": _bytes("state_bytes"),
    "commit": _column("commit"),
}
