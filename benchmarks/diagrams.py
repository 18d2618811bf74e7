"""Draw the pictures of docs/how-it-works.md: one step, the gate, keys and values, a timeline.

    python -m benchmarks.diagrams

The gate and the timeline are from a run of the shipped detector on a generated street, the other
two are drawings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import eventful
from eventful.surgery.libraries import load
from eventful.video.world import World

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
INK, FAINT, PAPER = "#26303b", "#8a94a0", "#ffffff"
NEW, OLD, DENSE = "#e8762d", "#cfd8e3", "#3f6fb5"  # computed now; from memory; computed whole
SEED, FRAMES, SHOWN = 7, 40, 22
CELLS = 12  # tokens of the drawing


def main() -> None:
    plt = load("matplotlib.pyplot")
    plt.rcParams.update(
        {
            **{"svg.hashsalt": "eventful", "font.size": 11, "text.color": INK},
            **{"axes.edgecolor": FAINT, "axes.labelcolor": INK},
            **{"xtick.color": INK, "ytick.color": INK},
        }
    )
    draw_step(plt, IMAGES / "how-step.svg")
    draw_keys_and_values(plt, IMAGES / "how-keys-and-values.svg")
    steps = run()
    draw_gate(plt, steps[SHOWN - 1], steps[SHOWN], IMAGES / "how-gate.png")
    draw_timeline(plt, steps, IMAGES / "how-timeline.svg")


class Step:
    """One frame of the run: its pixels and its record."""

    def __init__(self, pixels: Tensor, frame: Tensor, record: eventful.StepRecord) -> None:
        self.pixels, self.frame, self.record = pixels, frame, record


def run() -> list[Step]:
    """The shipped detector under the default, with maps of errors and updates."""
    model = eventful.load("detector")
    stream = eventful.Stream(
        eventful.convert(model, eventful.Config.fast(deterministic=True)), maps=True
    )
    steps = []
    for pixels in World(seed=SEED, frames=FRAMES):
        frame, placement = model.prepare(pixels)
        with torch.inference_mode():
            stream(frame, [placement])
        steps.append(Step(pixels, frame, stream.last))
    return steps


def canvas(plt: Any, width: float, height: float, inches: float = 9.5) -> tuple[Any, Any]:
    """An empty drawing of so many units, y downward."""
    figure, axes = plt.subplots(figsize=(inches, inches * height / width))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    axes.axis("off")
    return figure, axes


def box(axes: Any, at: tuple[float, float], size: tuple[float, float], text: str, **style: Any):
    """A box with rounded corners and a text in its middle."""
    patches = load("matplotlib.patches")
    look = {"facecolor": "#f4f6f9", "edgecolor": FAINT, "linewidth": 1.2, **style}
    shape = patches.FancyBboxPatch(at, *size, boxstyle="round,pad=0,rounding_size=0.12", **look)
    axes.add_patch(shape)
    middle = (at[0] + size[0] / 2, at[1] + size[1] / 2)
    axes.text(*middle, text, ha="center", va="center", fontsize=10.5, linespacing=1.35)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    """An arrow between two points."""
    look = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "mutation_scale": 12, **style}
    axes.annotate("", end, start, arrowprops={**look, "shrinkA": 0, "shrinkB": 0})


def cells(axes: Any, at: tuple[float, float], colours: Sequence[str], side: float) -> None:
    """A row of tokens."""
    patches = load("matplotlib.patches")
    for i, colour in enumerate(colours):
        look = {"facecolor": colour, "edgecolor": "white", "linewidth": 1.2}
        axes.add_patch(patches.Rectangle((at[0] + i * side, at[1]), side, side, **look))


def marked(chosen: Sequence[int]) -> list[str]:
    """Colours of the tokens of a row."""
    return [NEW if i in chosen else OLD for i in range(CELLS)]


def draw_step(plt: Any, path: Path) -> None:
    """One step under frame gating, from the frame to the output."""
    figure, axes = canvas(plt, 12.6, 5.6, 10.5)
    chosen, y = (3, 4, 8), 1.9
    box(axes, (0.2, y), (1.5, 1.1), "frame")
    box(axes, (2.3, y), (1.7, 1.1), "patch\nembedding")
    box(axes, (4.6, y), (1.7, 1.1), "gate", facecolor="#fdebdd", edgecolor=NEW)
    box(axes, (7.5, y), (2.3, 1.1), "blocks of the\ntransformer")
    box(axes, (10.9, y), (1.5, 1.1), "heads of\nthe model")
    for start, end in ((1.7, 2.3), (4.0, 4.6), (6.3, 7.5), (9.8, 10.9)):
        arrow(axes, (start, y + 0.55), (end, y + 0.55))
    strips = (
        (4.3, marked(range(CELLS)), f"{CELLS} tokens"),
        (6.9, [NEW] * len(chosen), f"{len(chosen)} selected"),
        (10.35, marked(chosen), f"{CELLS} outputs"),
    )
    for x, colours, text in strips:
        cells(axes, (x - len(colours) * 0.1, 1.3), colours, side=0.2)
        axes.text(x, 1.05, text, fontsize=9.5, ha="center", va="center")
        axes.plot((x, x), (1.56, y + 0.45), color=FAINT, linewidth=0.8, linestyle=":")
    memory = {"facecolor": "#eaf0f8", "edgecolor": DENSE}
    box(axes, (4.35, 4.0), (2.2, 0.9), "reference", **memory)
    box(axes, (7.55, 4.0), (2.2, 0.9), "keys and values\nof every block", **memory)
    box(axes, (10.0, 4.0), (2.2, 0.9), "output of\nevery token", **memory)
    for x, text in ((5.45, "compare,\nthen write"), (8.65, "write rows,\nread all")):
        arrow(axes, (x, y + 1.1), (x, 4.0), arrowstyle="<|-|>", color=DENSE)
        axes.text(x + 0.12, 3.5, text, fontsize=9.5, va="center", color=DENSE)
    arrow(axes, (10.35, 4.0), (10.35, y + 0.6), arrowstyle="<|-|>", color=DENSE)
    axes.text(10.47, 3.5, "write rows,\nread all", fontsize=9.5, va="center", color=DENSE)
    axes.text(0.2, 4.45, "memory of the stream", fontsize=11, color=DENSE, va="center")
    axes.plot((3.0, 4.2), (4.45, 4.45), color=DENSE, linewidth=1, linestyle=":")
    axes.text(0.2, 0.25, "one step of a stream", fontsize=12.5, weight="bold", va="center")
    axes.text(
        0.2, 5.3, f"{len(chosen)} tokens run through the blocks. The outputs of the other"
        f" {CELLS - len(chosen)} come from memory.", fontsize=10, color=INK, va="center",
    )  # fmt: skip
    save(plt, figure, path)


def draw_keys_and_values(plt: Any, path: Path) -> None:
    """What attention of one block computes and what it reads."""
    figure, axes = canvas(plt, 11.4, 5.0, 9.5)
    chosen, left = (3, 4, 8), 4.0
    rows = (
        (0.8, "tokens of this frame", marked(chosen)),
        (2.3, "keys in memory", marked(chosen)),
        (2.9, "values in memory", marked(chosen)),
        (4.3, "attention outputs", marked(chosen)),
    )
    for y, name, colours in rows:
        axes.text(left - 0.25, y + 0.17, name, ha="right", va="center")
        cells(axes, (left, y), colours, side=0.36)
    for i in chosen:
        x = left + (i + 0.5) * 0.36
        arrow(axes, (x, 1.2), (x, 2.26), color=NEW)
        arrow(axes, (x, 3.32), (x, 4.24), color=NEW)
    note = {"va": "center", "fontsize": 9.5, "color": NEW}
    beside = left - 0.25
    axes.text(beside, 1.7, "1  compute q, k, v of the selected", ha="right", **note)
    axes.text(beside, 3.8, "3  each selected query reads all keys", ha="right", **note)
    edge = left + CELLS * 0.36
    axes.text(edge + 0.25, 2.8, "2  their rows replace\n    the old ones", **note)
    axes.plot((left, left, edge, edge), (3.42, 3.52, 3.52, 3.42), color=FAINT, linewidth=1)
    cells(axes, (edge + 0.3, 0.6), [NEW], side=0.3)
    cells(axes, (edge + 0.3, 1.1), [OLD], side=0.3)
    axes.text(edge + 0.75, 0.75, "computed in this step", va="center", fontsize=9.5)
    axes.text(edge + 0.75, 1.25, "from memory", va="center", fontsize=9.5)
    axes.text(0.1, 0.3, "attention of one block", fontsize=12.5, weight="bold", va="center")
    save(plt, figure, path)


def draw_gate(plt: Any, before: Step, step: Step, path: Path) -> None:
    """Two frames, the errors at the gate, and the tokens that passed it."""
    figure, grids = plt.subplots(2, 2, figsize=(9.5, 5.9), layout="constrained")
    axes = list(grids.flat)
    height, width = step.pixels.shape[1:]
    grid = 32
    rows = -(-grid * height // width)
    error = step.record.error[0][-grid * grid :].reshape(grid, grid)[:rows]
    mask = step.record.mask[0][-grid * grid :].reshape(grid, grid)[:rows]
    picture = step.pixels.permute(1, 2, 0)
    axes[0].imshow(before.pixels.permute(1, 2, 0))
    axes[1].imshow(picture)
    extent = (0, width, rows * width / grid, 0)
    grey = picture.float().mean(-1)
    axes[2].imshow(grey, cmap="gray", vmin=0, vmax=255)
    axes[2].imshow(error, cmap="inferno", alpha=0.85, extent=extent)
    shade = torch.zeros(rows, grid, 4)
    shade[..., 3] = 0.72 * (~mask.bool()).float()
    axes[3].imshow(picture)
    axes[3].imshow(shade, extent=extent, interpolation="nearest")
    titles = (
        "the frame before",
        "this frame",
        "score of each token",
        f"selected: {int(mask.sum())} of {mask.numel()}",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
        axis.set_title(title, fontsize=12)
    save(plt, figure, path)


def draw_timeline(plt: Any, steps: Sequence[Step], path: Path) -> None:
    """Share of the tokens that each frame computed."""
    figure, axis = plt.subplots(figsize=(9.5, 2.9), layout="constrained")
    shares = [100 * step.record.fraction for step in steps]
    whole = [bool(step.record.flushed[0]) for step in steps]
    colours = [DENSE if flushed else NEW for flushed in whole]
    axis.bar(range(len(steps)), shares, width=0.82, color=colours)
    axis.bar(
        range(len(steps)), [100 - share for share in shares], bottom=shares, width=0.82, color=OLD
    )
    axis.set(xlabel="frame", ylabel="share of the tokens, %", xlim=(-0.7, len(steps) - 0.3))
    axis.spines[["top", "right"]].set_visible(False)
    patches = load("matplotlib.patches")
    named = {DENSE: "everything computed", NEW: "selected and computed", OLD: "from memory"}
    handles = [patches.Patch(color=colour, label=name) for colour, name in named.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    save(plt, figure, path)


def save(plt: Any, figure: Any, path: Path) -> None:
    """Write a picture that is the same bytes every time."""
    path.parent.mkdir(exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, facecolor=PAPER, metadata=metadata, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
