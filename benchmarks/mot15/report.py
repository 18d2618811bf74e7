"""Results: files, a picture, and the tables of a page."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.mot15.scores import Score
from benchmarks.mot15.settings import ROOT
from eventful import files
from eventful.bench.tables import put
from eventful.surgery import libraries

RESULTS = ROOT / "benchmarks" / "results" / "mot15"
PICTURE = ROOT / "docs" / "images" / "mot15.png"
PAGE = ROOT / "docs" / "mot15.md"
COLOURS = {
    "fast": "#d1495b",
    "exact": "#00798c",
    "paper": "#edae49",
    "tokenwise": "#66a182",
    "stgt": "#8d6a9f",
    "fast-former": "#e8a0aa",
    "fast-plain": "#c9b037",
    "fast-context": "#b0473f",
    "fast-motion": "#7d2e68",
    "fast-both": "#4a0d1a",
    "skip": "#777777",
    "skip-carried": "#222222",
}
SKIPS = {"skip": "dense, frames skipped", "skip-carried": "skipped, tokens carried"}
OWN = "its own policy"
LEGEND = {"loc": "outside lower center", "ncol": 9, "fontsize": 8, "frameon": False}


def write(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "results.json", result)
    where = result["origin"]
    with (folder / "results.csv").open("w", newline="") as file:
        columns = ["preset", "policy", *Score.__annotations__, "skip_map50", "skip_cost"]
        if any("skip_carried" in row for row in result["rows"]):
            columns.append("skip_carried_map50")
        writer = csv.DictWriter(file, [*columns, *where], lineterminator="\n")
        writer.writeheader()
        for row in result["rows"]:
            blank = [None] * len(row["scores"])
            others = row.get("skip") or blank, row.get("skip_carried") or blank
            for mine, skip, carried in zip(row["scores"], *others, strict=True):
                values = {"preset": row["preset"], "policy": row["policy"], **mine}
                if skip is not None:
                    values |= {"skip_map50": skip["map50"], "skip_cost": skip["cost"]}
                if carried is not None:
                    values["skip_carried_map50"] = carried["map50"]
                short = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in values.items()}
                writer.writerow({**short, **where})


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy against operations, as in the paper: all sequences, then each."""
    plt = libraries.load("matplotlib.pyplot")
    names = [s["sequence"] for s in result["rows"][0]["scores"]]
    shape = (3.6 * len(names), 3.9)
    figure, axes = plt.subplots(1, len(names), figsize=shape, layout="constrained")
    for i, (name, axis) in enumerate(zip(names, np.atleast_1d(axes), strict=True)):
        for preset in COLOURS:
            mine = [r for r in result["rows"] if r["preset"] == preset]
            line = sorted(
                (r["scores"][i]["gmacs"], r["scores"][i]["map50"])
                for r in mine
                if r["policy"] != "own"
            )
            style = {"ls": "--", "marker": "."} if preset in SKIPS else {"marker": "o", "ms": 4}
            label = SKIPS.get(preset, preset)
            if line:
                axis.plot(*zip(*line, strict=True), color=COLOURS[preset], label=label, **style)
            for row in mine:
                if row["policy"] == "own":
                    point = (row["scores"][i]["gmacs"], row["scores"][i]["map50"])
                    text = f"{preset}, {OWN}"
                    axis.plot(*point, "*", ms=11, color=COLOURS[preset], label=text, mec="white")
        dense = result["rows"][0]["scores"][i]
        axis.plot(dense["gmacs"], dense["map50"], "ks", ms=6, label="dense")
        axis.axhline(dense["map50"], color="black", lw=0.6, ls=":")
        axis.set_title("all of val" if name == "all" else name, fontsize=10)
        axis.set_xlabel("operations per frame (GMAC)")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
    np.atleast_1d(axes)[0].set_ylabel("mAP50, people")
    figure.legend(*np.atleast_1d(axes)[0].get_legend_handles_labels(), **LEGEND)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(str(path), dpi=130)
    plt.close(figure)


def table(result: dict[str, Any]) -> str:
    """Every preset and budget beside skipping at its cost, plain and carried; the best is bold."""
    names = [s["sequence"] for s in result["rows"][0]["scores"]]
    head = ["preset", "tokens", "operations", *names]
    lines = [head, ["---", "---", "--:", *["--:"] * len(names)]]
    for row in result["rows"]:
        if row["preset"] in SKIPS:
            continue
        others = [row[key] for key in ("skip", "skip_carried") if row.get(key)]
        cells = [_compared(*cell) for cell in zip(row["scores"], *others, strict=True)]
        policy = OWN if row["policy"] == "own" else row["policy"] or "all"
        lines.append([row["preset"], policy, f"{row['scores'][0]['cost']:.1%}", *cells])
    where, place = result["origin"], place_of(result)[0]
    source = (
        f"*{where['device_name']}, torch {where['torch']}, timm {where['timm']}, commit "
        f"{where['commit']}: [results](../{place.relative_to(ROOT).as_posix()}/results.csv).*"
    )
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*rows, "", source])


def _compared(*given: dict[str, Any]) -> str:
    """Values of mAP50 in percent, the best bold; of equal ones the last."""
    values = [score["map50"] for score in given]
    best = len(values) - 1 - values[::-1].index(max(values))
    shown = [f"{100 * value:.1f}" for value in values]
    if len(shown) > 1:
        shown[best] = f"**{shown[best]}**"
    return " / ".join(shown)


def place_of(result: dict[str, Any]) -> tuple[Path, Path, str]:
    """Folder, picture and mark in the page: of all presets, or of variants of `fast` alone."""
    if result["options"]["presets"]:
        return RESULTS, PICTURE, "mot15"
    return RESULTS / "variants", PICTURE.with_name("mot15-variants.png"), "variants"


def store(result: dict[str, Any], out: Path, *, publish: bool) -> None:
    """Files and picture in the folder of the run and, unless it was a trial, in the repository."""
    home, image, mark = place_of(result)
    places = [(out, out / "figure.png")] + ([(home, image)] if publish else [])
    for folder, picture in places:
        write(result, folder)
        if importlib.util.find_spec("matplotlib") is None:
            print(f"No matplotlib here: draw elsewhere with --from {folder / 'results.json'}")
        else:
            draw(result, picture)
    if publish:
        put(PAGE, table(result), mark)
