"""`eventful reproduce`: the paper's costs and memory figures, from the shapes of its models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from eventful.cli import paper_tables as paper
from eventful.config import Config
from eventful.cost.counting import BlockWork, attention_bytes, token_bytes
from eventful.cost.models import CLIP_FRAMES, count_clip, count_video
from eventful.models.shapes import spatial_shapes, temporal_shapes, vitdet_shapes

Row = dict[str, Any]

_EXPLANATION = f"""\
ViTDet: mean over {CLIP_FRAMES} frames, the first a flush. ViViT: sum over a video.
Spatiotemporal: from the fewest to the most pooled keys that tokens can touch.
Threshold: how many tokens exceed h depends on the videos, not on shapes alone."""

_RULES = {
    paper.OURS: Config.paper(),
    paper.TEMPORAL: Config.paper(),
    paper.SPATIOTEMPORAL: Config.paper(pool=2),
    paper.TOKENWISE: Config.tokenwise(),
    paper.STGT: Config.stgt(),
}


def counts(as_json: bool) -> None:
    """Print every published cost beside the closed form."""
    rows = count_rows()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = ("variant", "size", "r", "paper", "ours", "difference")
    for name, title in paper.TITLES.items():
        published = [cost for cost in paper.COSTS if cost.table == name]
        found = [row for row in rows if row["table"] == name]
        cells = [_count_cells(*pair) for pair in zip(published, found, strict=True)]
        _print(f"{name}. {title}, {published[0].unit}", columns, cells)
    print(_EXPLANATION)


def memory(as_json: bool) -> None:
    """Print every published memory figure beside the closed form."""
    rows = memory_rows()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = ("figure", "size", "tokens", "precision", "paper", "ours", "difference")
    cells = [
        (
            row["figure"],
            str(row["size"]),
            str(row["tokens"]),
            row["precision"],
            f"{row['paper']:g}",
            f"{row['ours']:.2f}",
            f"{row['relative_difference']:+.2%}",
        )
        for row in rows
    ]
    _print("One state tensor of one block (Section 6), 10^6 bytes", columns, cells)
    for note in dict.fromkeys(row["note"] for row in rows if "note" in row):
        print(note)


def count_rows() -> list[Row]:
    """One row per published cost: the paper's number, ours, and how far they are apart."""
    return [_count_row(published) for published in paper.COSTS]


def memory_rows() -> list[Row]:
    """One row per published memory figure and precision; a misprint is shown both ways."""
    rows = []
    for published in paper.MEMORY:
        for index, (precision, itemsize) in enumerate((("full", 4), ("half", 2))):
            for tokens in filter(None, (published.printed_tokens, published.tokens)):
                value = published.value[index]
                ours = _state_bytes(published.figure, tokens, itemsize) / 1e6
                row: Row = {
                    "figure": published.figure,
                    "size": published.size,
                    "tokens": tokens,
                    "precision": precision,
                    "paper": value,
                    "ours": ours,
                    "relative_difference": ours / value - 1,
                }
                if published.printed_tokens is not None:
                    row["note"] = _misprint_note(published, tokens)
                rows.append(row)
    return rows


def _count_row(published: paper.PublishedCost) -> Row:
    row: Row = {
        "table": published.table,
        "variant": published.variant,
        "size": published.size,
        "r": published.r,
        "unit": published.unit,
        "paper": published.value,
        "ours": None,
        "relative_difference": None,
    }
    for name in ("tuned_r", "h"):
        if getattr(published, name) is not None:
            row[name] = getattr(published, name)
    if published.h is not None:
        row["reason"] = "how many tokens exceed h depends on the videos, not on shapes"
    elif published.variant == paper.SPATIOTEMPORAL:
        row.update(_bracket(published))
    else:
        row["ours"] = _cost(published)
        row["relative_difference"] = row["ours"] / published.value - 1
    return row


def _cost(published: paper.PublishedCost, pooled_keys: int | None = None) -> float:
    """The closed form, in the row's unit."""
    rule = _RULES.get(published.variant)
    work = None if published.r is None else BlockWork.uniform(published.r, pooled_keys)
    if published.unit == "TFlops":
        shapes = spatial_shapes(published.size)
        return count_video(shapes, temporal_shapes(published.size), rule, work).total / 1e12
    pooled = published.variant in (paper.SPATIAL, paper.SPATIOTEMPORAL)
    shapes = vitdet_shapes(published.size, pool=2 if pooled else 1)
    return count_clip(shapes, rule, work).total / CLIP_FRAMES / 1e9


def _bracket(published: paper.PublishedCost) -> Row:
    """Costs when the selected tokens share as few, and as many, pooling cells as they can.

    The cost is linear in the pooled keys touched, so the published one implies their number.
    """
    selected = published.r or 0
    cells = vitdet_shapes(published.size, pool=2)[-1].keys
    fewest, highest = -(-selected // 4), min(selected, cells)
    low, high = _cost(published, fewest), _cost(published, highest)
    implied = fewest + (published.value - low) / (high - low) * (highest - fewest)
    return {
        "low": low,
        "high": high,
        "reason": f"the videos decide how many pooled keys are touched, {fewest} to {highest} of "
        f"{cells} a frame; the published cost implies {implied:.0f}",
    }


def _state_bytes(figure: str, tokens: int, itemsize: int) -> int:
    block = vitdet_shapes(1024)[0]
    if figure == paper.TOKEN_STATE:
        return token_bytes(tokens, block.dim, itemsize)
    return attention_bytes(block.heads, tokens, tokens, itemsize)


def _misprint_note(published: paper.PublishedMemory, tokens: int) -> str:
    if tokens == published.printed_tokens:
        return f"With {tokens} tokens, as printed, the paper's ViViT figure is reproduced."
    return f"ViViT has {tokens} tokens; the paper's {published.printed_tokens} is a misprint."


def _count_cells(published: paper.PublishedCost, row: Row) -> tuple[str, ...]:
    """One line of a table; ours is shown with one digit more than the paper printed."""
    digits = published.decimals + 1
    if "low" in row:
        ours = f"{row['low']:.{digits}f} to {row['high']:.{digits}f}"
    else:
        ours = "-" if row["ours"] is None else f"{row['ours']:.{digits}f}"
    chosen = "-" if published.r is None else str(published.r)
    if published.tuned_r is not None:
        chosen += f" (tuned at {published.tuned_r})"
    return (
        published.variant,
        str(published.size),
        chosen if published.h is None else f"h = {published.h}",
        f"{published.value:.{published.decimals}f}",
        ours,
        "-" if row["ours"] is None else f"{row['relative_difference']:+.2%}",
    )


def _print(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in ("paper", "ours") else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
