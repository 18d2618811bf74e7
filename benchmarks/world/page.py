"""Stores results, and writes the page about them."""

from __future__ import annotations

import csv
import json
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

from benchmarks.world.claims import SECTIONS
from benchmarks.world.results import Results
from eventful import files
from eventful.bench.tables import put
from eventful.paper.evaluate.experiment import load as load_experiment
from eventful.paper.evaluate.report import Report, Row
from eventful.paper.evaluate.trace import TraceReport
from eventful.surgery.libraries import load

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "world"
DOCS = ROOT / "docs"
PAGE = DOCS / "results.md"
TABLES = ("results.json", "results.csv", "groups.csv", "trace.csv", "parts.csv", "masks.csv")
PICTURES = ("figure.png", "groups.png")
PROSE = 125  # characters of a line
WIDTH = 1400  # pixels of a picture on the page, at most
TEXTS = {
    "figure.png": "The measured figure of {}",
    "groups.png": "The same for each camera, {}",
}


def store(source: Path, name: str) -> None:
    """Copy tables and pictures of a run to where the page finds them."""
    target = RESULTS / name
    target.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        if (source / table).is_file():
            shutil.copyfile(source / table, target / table)
    if not (source / "figure.png").is_file():
        draw(source, name)  # the machine of the run had no matplotlib
    for picture in PICTURES:
        if (source / picture).is_file():
            _smaller(source / picture, _image(name, picture))


def draw(folder: Path, name: str) -> None:
    """Draw the figures of a run from its tables; pictures of masks need the run itself."""
    data = json.loads((folder / "results.json").read_text())
    made = replace(load_experiment(name), metric=data["metric"])
    rows = tuple(Row(**row) for row in data["rows"])
    groups = {camera: tuple(Row(**row) for row in own) for camera, own in data["groups"].items()}
    if made.kind == "trace":
        with (folder / "trace.csv").open(newline="") as file:
            steps = [
                {
                    **row,
                    "frame": int(row["frame"]),
                    "error": float(row["error"]),
                    "operations": float(row["operations"]),
                }
                for row in csv.DictReader(file)
            ]
        parts = tuple(data["parts"])
        TraceReport(made, rows, {}, {}, steps=tuple(steps), parts=parts).draw(folder)
    elif made.kind == "accuracy":
        Report(made, rows, {}, {}, groups=groups).draw(folder)


def write_page() -> None:
    """Put figures, tables and sentences of all stored results into the page."""
    for name in SECTIONS:
        put(PAGE, section(name), name)


def section(name: str) -> str:
    """The text between the marks of one experiment."""
    results = Results.read(RESULTS / name)
    if results is None:
        return f"Not measured yet: `eventful reproduce {name}`."
    first, *more = SECTIONS[name]
    parts = [_picture(name, "figure.png"), first(results)]
    for made in more:
        parts += [_picture(name, "groups.png"), made(results)]
    files_of = ", ".join(
        f"[{table}](../benchmarks/results/world/{name}/{table})"
        for table in TABLES
        if (RESULTS / name / table).is_file()
    )
    missing = [f"Left out: {key}, {why}" for key, why in _left_out(results).items()]
    text = "\n\n".join([*filter(None, parts), *missing, f"*{results.about}. {files_of}*"])
    return "\n".join(_wrapped(line) for line in text.splitlines())


def _wrapped(line: str) -> str:
    """Prose in lines of the page's width; tables, pictures and links as they are."""
    if line.startswith(("|", "!")):
        return line
    return textwrap.fill(
        line,
        PROSE,
        subsequent_indent="  " if line.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _left_out(results: Results) -> dict[str, str]:
    """What was not measured, the same reason once."""
    reasons: dict[str, list[str]] = {}
    for key, why in results.data["left_out"].items():
        if key != "coco_map50":
            reasons.setdefault(why, []).append(key)
    return {", ".join(keys): f"{why}." for why, keys in reasons.items()}


def _picture(name: str, picture: str) -> str:
    path = _image(name, picture)
    text = TEXTS[picture].format(name)
    return f"![{text}]({path.relative_to(DOCS).as_posix()})" if path.is_file() else ""


def _image(name: str, picture: str) -> Path:
    ending = "" if picture == "figure.png" else f"-{Path(picture).stem}"
    return DOCS / "images" / f"results-{name.removeprefix('world-')}{ending}.png"


def _smaller(source: Path, target: Path) -> None:
    pillow = load("PIL.Image")
    with pillow.open(source) as opened:
        picture = opened.convert("RGB")
        if picture.width > WIDTH:
            height = round(picture.height * WIDTH / picture.width)
            picture = picture.resize((WIDTH, height), pillow.Resampling.LANCZOS)
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(target) as partial:
            picture.quantize(256).save(partial, format="PNG", optimize=True)
