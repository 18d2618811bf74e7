"""Takes a census of model classes: which convert, by which adapter, and why others do not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import eventful
from eventful import Config, TopR
from eventful.cost.times import use_clock
from eventful.errors import NoMatchError, UnsupportedError
from eventful.surgery.conversion import find_session
from tolerances import apart, limit

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
EVERY = 10**6  # more tokens than any model has

Run = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A class of the census.

    Attributes:
        name: of the model's class.
        make: a random model in eval mode; seed torch first.
        shape: of a frame, without the batch.
        call: runs a model or a stream on a frame.
        wraps: the row whose blocks it has; such a model is not counted.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 32, 32)
    call: Callable[[Run, Tensor], Any] = lambda run, frame: run(pixel_values=frame)
    wraps: str = ""


@dataclass(frozen=True)
class Row:
    """What the census found.

    Attributes:
        adapter: how the class converts; empty if it does not.
        blocks: how many blocks convert, and how many there are.
        reason: why it does not convert.
    """

    name: str
    adapter: str = ""
    blocks: tuple[int, int] = (0, 0)
    reason: str = ""


def judged(case: Case) -> Row:
    """Convert a model and step it with all tokens selected: it must equal the dense model.

    Raises:
        AssertionError: a step differs, or refuses what conversion and inspection promised.
    """
    torch.manual_seed(0)
    model = case.make()
    found = eventful.inspect(model)
    try:
        converted = eventful.convert(model, Config.fast(TopR(EVERY)))
    except (NoMatchError, UnsupportedError) as refusal:
        return Row(case.name, reason=str(refusal))
    stream = eventful.Stream(converted)
    for frame in torch.randn(3, 1, *case.shape).unbind():
        with torch.no_grad():
            wanted = case.call(model, frame)
        same(case.call(stream, frame), wanted)
    assert stream.last is not None
    assert not stream.last.flushed[0]
    session = find_session(converted)
    assert session is not None
    names = sorted({adapter.name for _, adapter in session.trunks.values()})
    return Row(case.name, ", ".join(names), (found.matched, len(found.blocks)))


def same(got: Any, wanted: Any) -> None:
    """Of one type, and every tensor in it the same."""
    assert type(got) is type(wanted)
    pairs = list(zip(tensors(got), tensors(wanted), strict=True))
    assert pairs
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype
        error = apart(mine, theirs)
        assert error <= limit("model"), f"{error:.1e} apart"


def tensors(result: Any) -> Iterator[Tensor]:
    """Every tensor of a model's output, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from tensors(value)
    elif isinstance(result, tuple | list):
        for value in result:
            yield from tensors(value)


def table(rows: list[Row], cases: list[Case]) -> str:
    """The rows as they stand in the docs."""
    pairs = list(zip(rows, cases, strict=True))
    counted = [row for row, case in pairs if not case.wraps]
    others = [(row, case.wraps) for row, case in pairs if case.wraps]
    converted = sum(bool(row.adapter) for row in counted)
    lines = [
        f"{converted} of {len(counted)} classes convert, and a step with all tokens equals the "
        "dense model. The others are refused.",
        "",
        "| class | blocks | by |",
        "|---|--:|---|",
        *(f"| `{row.name}` | {_share(row)} | {row.adapter} |" for row in counted if row.adapter),
        "",
        "| refused | because |",
        "|---|---|",
        *(f"| `{row.name}` | {_cell(row.reason)} |" for row in counted if not row.adapter),
    ]
    if others:
        lines += [
            "",
            "Models over one of these, not counted:",
            "",
            "| class | over | blocks |",
            "|---|---|--:|",
            *(f"| `{row.name}` | `{wraps}` | {_share(row)} |" for row, wraps in others),
        ]
    return "\n".join(lines)


def _cell(reason: str) -> str:
    """A reason without the words that all of them begin with."""
    return reason.removeprefix("No block can be made eventful. ").replace("|", "/").rstrip(".")


def _share(row: Row) -> str:
    return f"{row.blocks[0]} of {row.blocks[1]}" if row.adapter else _cell(row.reason)


def written(page: str, library: str) -> str:
    """The table of a library as it stands in the docs."""
    begin, end = _marks(library)
    return page.split(begin)[1].split(end)[0].strip()


def _marks(library: str) -> tuple[str, str]:
    return f"<!-- classes-{library}:begin -->", f"<!-- classes-{library}:end -->"


def replace_table(name: str, text: str) -> None:
    """Write a table of the docs again."""
    page = PAGE.read_text()
    begin, end = _marks(name)
    before, rest = page.split(begin)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")


def main(cases: list[Case], library: str) -> None:
    """Write the table of a library into the docs."""
    with use_clock(lambda: 0.0):
        rows = [judged(case) for case in cases]
    text = table(rows, cases)
    replace_table(library, text)
    print(text.splitlines()[0], file=sys.stderr)
