"""Tile sizes that fit: devices differ in shared memory, types in how much of it a tile takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from triton.runtime.errors import OutOfResources

Result = TypeVar("Result")
Tile = dict[str, int]

_found: dict[Hashable, int] = {}


def fitting(key: Hashable, tiles: Sequence[Tile], launch: Callable[..., Result]) -> Result:
    """Launch with the first of `tiles`, largest first, that the device has shared memory for.

    Args:
        key: what the need for memory depends on, the device among it; the choice is remembered.
        launch: takes a tile's entries by name.
    """
    refused: Any = None
    for place in range(_found.get(key, 0), len(tiles)):
        try:
            result = launch(**tiles[place])
        except OutOfResources as error:
            refused = error
            continue
        _found[key] = place
        return result
    raise refused
