"""Draw the pictures of docs/world.md: scenes, cameras, ground truth, actions and classes.

python benchmarks/world_sheets.py [NAME]...
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from eventful.video.world import ACTIONS, CAMERAS, CLASSES, RATE, Truth, World, as_bytes, render
from eventful.video.world.chance import choice, uniform
from eventful.video.world.figures import table
from eventful.video.world.tracks import Actors

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
QUALITY, MOST = 85, 400_000  # of JPEG files, and bytes
GAP, LINE = 4, 18  # pixels between pictures, and of a line of text
COLOURS = ("#ffb000", "#fe6100", "#dc267f", "#785ef0", "#648fff", "#3ddc97", "#f5f749", "#ff7f9f",
           "#8be9fd", "#c0ff72", "#ffffff", "#b08d57", "#d0a0ff", "#ff4040")  # fmt: skip
Row = tuple[str, Sequence[Image.Image]]


def image(pixels: Tensor, width: int) -> Image.Image:
    """A picture (3, H, W), in bytes or in [0, 1], at a width."""
    pixels = pixels if pixels.dtype == torch.uint8 else as_bytes(pixels.clamp(0, 1))
    made = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    return made.resize((width, round(width * made.height / made.width)), Image.Resampling.LANCZOS)


def boxed(pixels: Tensor, truth: Truth, width: int, *, texts: bool = True) -> Image.Image:
    """A frame with its boxes; those to ignore are thin and grey."""
    made = image(pixels, width)
    draw, scale = ImageDraw.Draw(made), width / pixels.shape[-1]
    font = ImageFont.load_default(11)
    for box, label, ignore in zip(
        truth.boxes.tolist(), truth.labels.tolist(), truth.ignore.tolist(), strict=True
    ):
        edges = [side * scale for side in box]
        colour = "#c8c8c8" if ignore else COLOURS[label]
        draw.rectangle(edges, outline=colour, width=1 if ignore else 2)
        if texts and not ignore:
            top = max(0.0, edges[1] - 12)
            draw.text((edges[0] + 2, top), CLASSES[label], fill=colour, font=font,
                      stroke_width=1, stroke_fill="black")  # fmt: skip
    return made


def sheet(rows: Sequence[Row], heads: Sequence[str] = ()) -> Image.Image:
    """Rows of pictures with a text above each; `heads` is a text above each column."""
    font = ImageFont.load_default(13)
    width = max(sum(p.width + GAP for p in pictures) for _, pictures in rows) - GAP
    height = sum(max(p.height for p in ps) + GAP + (LINE if text else 0) for text, ps in rows)
    canvas = Image.new("RGB", (width, height + (LINE if heads else 0)), "white")
    draw, y = ImageDraw.Draw(canvas), 0
    if heads:
        for column, head in enumerate(heads):
            x = sum(p.width + GAP for p in rows[0][1][:column])
            draw.text((x + 2, 1), head, fill="black", font=font)
        y = LINE
    for text, pictures in rows:
        if text:
            draw.text((2, y + 1), text, fill="black", font=font)
            y += LINE
        x = 0
        for picture in pictures:
            canvas.paste(picture, (x, y))
            x += picture.width + GAP
        y += max(p.height for p in pictures) + GAP
    return canvas


def beside(left: Image.Image, right: Image.Image) -> Image.Image:
    """Two sheets as one."""
    canvas = Image.new("RGB", (left.width + right.width + 4 * GAP, left.height), "white")
    canvas.paste(left, (0, 0))
    canvas.paste(right, (left.width + 4 * GAP, 0))
    return canvas


def street() -> Image.Image:
    """Scenes of the first seeds."""
    pictures = [image(World(seed, camera="stand").read([25])[0], 396) for seed in range(12)]
    return sheet([("", pictures[first : first + 3]) for first in range(0, 12, 3)])


def cameras() -> Image.Image:
    """A scene by each camera, at four times."""
    rows, times = [], (5, 25, 50, 75)
    for seed, camera in enumerate(CAMERAS):
        world = World(40 + seed, camera=camera)
        pixels = world.read(times)
        shown = [
            boxed(frame, world.truth(index), 310, texts=False)
            for index, frame in zip(times, pixels, strict=True)
        ]
        rows.append((camera, shown))
    return sheet(rows, [f"{index / RATE:g} s" for index in times])


def truth() -> Image.Image:
    """Frames with masks, depth and boxes."""
    rows: list[Row] = []
    for seed in (0, 3, 8, 21):
        world = World(seed, camera="stand")
        pixels, found = world.read([30])[0], world.truth(30)
        masks = 0.25 * pixels.float() / 255
        for mask, track in zip(found.masks, found.tracks.tolist(), strict=True):
            colour = torch.tensor(Image.new("RGB", (1, 1), COLOURS[track % 14]).getpixel((0, 0)))
            masks = torch.where(mask, colour[:, None, None] / 255, masks)
        near = (1 - found.depth.clamp(3, 30).log2().sub(1.585).div(3.322)).expand(3, -1, -1)
        width = 316
        rows.append(
            ("", [image(pixels, width), image(masks, width), image(near, width),
                  boxed(pixels, found, width)])
        )  # fmt: skip
    return sheet(rows, ("frame", "masks by track", "depth, near is light", "boxes"))


def actions() -> Image.Image:
    """Five moments of each action."""
    rows: list[Row] = []
    for number, action in enumerate(ACTIONS):
        world = World(84 + number, 32, "stand", (160, 160), action=action)
        rows.append((action, [image(frame, 112) for frame in world.read([0, 8, 16, 24, 31])]))
    return beside(sheet(rows[:8]), sheet(rows[8:]))


def classes() -> Image.Image:
    """Each class several times, in colours and scenes of several seeds."""
    rows: list[Row] = []
    for label, name in enumerate(CLASSES):
        seeds = torch.arange(700 + 10 * label, 706 + 10 * label, dtype=torch.int32)
        shot = render(
            seeds, torch.zeros(6, dtype=torch.long), torch.ones(6), (320, 320),
            lambda seeds, seconds, label=label: _alone(seeds, label), exposures=1,
        )  # fmt: skip
        rows.append((name, [image(frame, 100) for frame in _cut(shot.pixels, shot.owner)]))
    return beside(sheet(rows[:7]), sheet(rows[7:]))


def _alone(seeds: Tensor, label: int) -> Actors:
    """One figure ahead of the camera."""
    kind = torch.full((len(seeds), 1), label)
    facts = table(seeds.device).facts[kind]
    metres = (facts[..., 1] + facts[..., 2]) / 2
    zero, key = torch.zeros_like(metres), seeds[:, None] * 31
    turn = torch.where(choice(2, key, 2) > 0, 1.0, -1.0)
    lift = zero + facts[..., 6]
    there = torch.ones_like(metres, dtype=torch.bool)
    return Actors(
        kind, zero, lift, 1.5 + 2.4 * metres, metres, turn, zero, uniform(key, 1, high=6.3), key,
        torch.zeros_like(kind), there,
    )  # fmt: skip


def _cut(pixels: Tensor, owner: Tensor) -> list[Tensor]:
    """A square about each figure."""
    cut = []
    for frame, mine in zip(pixels, owner, strict=True):
        rows, columns = (mine >= 0).nonzero().unbind(dim=1)
        top, left = int(rows.min()), int(columns.min())
        bottom, right = int(rows.max()) + 1, int(columns.max()) + 1
        side = min(round(1.2 * max(bottom - top, right - left)), *frame.shape[1:])
        y = min(max(0, (top + bottom - side) // 2), frame.shape[1] - side)
        x = min(max(0, (left + right - side) // 2), frame.shape[2] - side)
        square = frame[None, :, y : y + side, x : x + side]
        cut.append(F.interpolate(square, (100, 100), mode="bilinear", antialias=True)[0])
    return cut


SHEETS: dict[str, Callable[[], Image.Image]] = {
    "street": street, "cameras": cameras, "truth": truth, "actions": actions, "classes": classes,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SHEETS))
    for name in parser.parse_args().names or SHEETS:
        path = IMAGES / f"world-{name}.jpg"
        SHEETS[name]().save(path, quality=QUALITY, optimize=True)
        if path.stat().st_size > MOST:
            raise SystemExit(
                f"{path} is larger than {MOST:,} bytes; show fewer or smaller pictures."
            )
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
