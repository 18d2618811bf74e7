"""Operations are printed in a unit that fits them: a small model does not need 0.0 GFlops."""

from __future__ import annotations

import pytest

from eventful.cost.units import in_words, unit_of
from eventful.paper.evaluate.report import Row, Scale


@pytest.mark.parametrize(
    ("operations", "text"),
    [
        (467.4e9, "467 GFlops"),
        (4.674e9, "4.67 GFlops"),
        (999.96e6, "1,000 MFlops"),
        (31.4e6, "31.4 MFlops"),
        (7_310, "7.31 KFlops"),
        (12, "12 Flops"),
        (0, "0 Flops"),
        (7.12e12, "7.12 TFlops"),
    ],
)
def test_the_unit_follows_the_number(operations: float, text: str) -> None:
    assert in_words(operations) == text


def test_units_are_those_of_the_paper() -> None:
    assert [unit_of(10.0**power).name[0] for power in (3, 6, 9, 12)] == ["K", "M", "G", "T"]


def row(operations: float, dense: float, published: float | None = None, model="vitdet") -> Row:
    return Row(
        "key", "label", "fast", model, 64, operations=operations, dense_operations=dense,
        published_operations=published,
    )  # fmt: skip


def test_a_table_of_a_small_model_has_a_small_unit() -> None:
    scale = Scale.of("vitdet", [row(0.0313, 0.0313), row(0.0042, 0.0313)])
    assert scale.name == "MFlops per frame"
    assert f"{0.0042 * scale.factor:.{scale.digits}f}" == "4.2"
    small = Scale.of("vivit", [row(0.00021, 0.0009, model="vivit")])
    assert (small.name, small.factor) == ("MFlops per video", pytest.approx(1e6))


def test_a_small_number_beside_a_large_one_is_not_zero() -> None:
    scale = Scale.of("vitdet", [row(467.4, 467.4), row(0.02, 467.4)])
    assert scale.name == "GFlops per frame"
    assert f"{0.02:.{scale.digits}f}" == "0.020"


def test_published_numbers_keep_the_units_of_the_paper() -> None:
    assert Scale.of("vitdet", [row(0.03, 0.03, published=467.4)]) == Scale.of("vitdet", [])
    assert Scale.of("vitdet", [row(467.4, 467.4)]) == Scale("GFlops per frame", 1.0, 1)
    assert Scale.of("vivit", [row(7.12, 7.12, model="vivit")]) == Scale("TFlops per video", 1.0, 3)
