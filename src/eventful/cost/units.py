"""Operations in words: the unit is chosen by their number, so that small models are not 0.0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A unit of operations, as the paper writes them: one multiply-accumulate is one Flop."""

    name: str
    size: float

    def text(self, operations: float) -> str:
        """A number of operations in this unit, with three digits or more."""
        value = operations / self.size
        return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


UNITS = (
    Unit("TFlops", 1e12),
    Unit("GFlops", 1e9),
    Unit("MFlops", 1e6),
    Unit("KFlops", 1e3),
    Unit("Flops", 1.0),
)


def unit_of(operations: float) -> Unit:
    """The largest unit of which there is at least one."""
    return next((unit for unit in UNITS if operations >= unit.size), UNITS[-1])


def in_words(operations: float) -> str:
    """Operations with their unit: `4.67 GFlops`."""
    unit = unit_of(operations)
    return f"{unit.text(operations)} {unit.name}"
