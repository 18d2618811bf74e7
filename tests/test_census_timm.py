"""The committed list of timm's architectures: each converts, or is refused with a named part."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import eventful
from census_timm import CENSUS, SIDE, Row, result, table
from clips import moving_square
from eventful import Config, TopR
from eventful.errors import NoMatchError
from tolerances import assert_near

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
IN_STAGES = ("vitamin", "pit", "crossvit", "volo", "vit_base_mci", "vit_tiny_r")


def rows(refused: bool) -> list[object]:
    """The architectures that convert, or those that do not; large ones are slow."""
    return [
        pytest.param(row, id=name, marks=[pytest.mark.slow] if _large(name, row) else [])
        for name, row in CENSUS.items()
        if (row.refused is not None) == refused
    ]


def _large(name: str, row: Row) -> bool:
    return name.startswith(IN_STAGES) or row.side != SIDE


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_the_list_is_long_enough() -> None:
    assert len(CENSUS) == 70
    assert sum(row.refused is None for row in CENSUS.values()) >= 50


@pytest.mark.parametrize("row", rows(refused=False))
def test_it_converts_and_all_tokens_is_dense(row: Row) -> None:
    model = row.build()
    stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(10**6))))
    with torch.no_grad():
        for frame in moving_square(2, (row.side, row.side), noise=0.1):
            assert_near(stream(frame), model(frame))


@pytest.mark.parametrize("row", rows(refused=True))
def test_it_is_refused_and_the_part_is_named(row: Row) -> None:
    assert row.refused is not None
    with pytest.raises(NoMatchError, match=row.refused):
        eventful.convert(row.build())


def test_the_page_lists_every_architecture() -> None:
    page = PAGE.read_text()
    listed = re.findall(r"^\| `(\w+)` \|.*\|$", page, re.MULTILINE)
    assert [name for name in CENSUS if name not in listed] == []


@pytest.mark.slow
def test_the_table_of_the_page_is_what_the_code_gives() -> None:
    assert table() in PAGE.read_text()


def test_a_row_of_the_table_is_checked() -> None:
    row = CENSUS["naflexvit_base_patch16_gap"]
    assert result(row) == ("structure", "")
