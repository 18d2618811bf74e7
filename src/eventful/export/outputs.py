"""A model's output as a list of tensors, and back.

A skeleton is plain data: what holds the tensors, with the number of each in the list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from eventful.errors import UnsupportedError

Skeleton = dict[str, Any]
Leaf = TypeVar("Leaf")


def flatten(output: Any) -> tuple[list[Tensor], Skeleton]:
    """The tensors of an output, and its skeleton.

    Raises:
        UnsupportedError: it holds something else than tensors in dicts, lists and tuples.
    """
    leaves: list[Tensor] = []
    skeleton = _part(output, "", leaves)
    _name_apart(skeleton)
    return leaves, skeleton


def _name_apart(skeleton: Skeleton) -> None:
    """Give leaves names that no other has: a key may hold a dot, or be empty."""
    taken: set[str] = set()
    for leaf in _leaves(skeleton):
        name, number = leaf["name"], 2
        while leaf["name"] in taken:
            leaf["name"], number = f"{name}_{number}", number + 1
        taken.add(leaf["name"])


def _part(value: Any, where: str, leaves: list[Tensor]) -> Skeleton:
    if isinstance(value, Tensor):
        leaves.append(value)
        return {"leaf": len(leaves) - 1, "name": where or "output"}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if callable(getattr(type(value), "tensors", None)):  # detections of a ViTDet
        value = value.tensors()
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):  # an output of transformers, too
        named = {str(key): _part(held, _joined(where, key), leaves) for key, held in value.items()}
        if len(named) < len(value):
            raise UnsupportedError(
                f"Two keys of the model's output read alike: {list(map(str, value))}. Name them "
                "apart, or export a part of the model."
            )
        return {"dict": named}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_part(held, _joined(where, at), leaves) for at, held in enumerate(value)]}
    at = f" at {where}" if where else ""
    raise UnsupportedError(
        f"The model's output holds a {type(value).__name__}{at}, which "
        "a graph cannot return. Export a part of the model that returns tensors, or wrap it in a "
        "module that does."
    )


def _joined(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def leaf_names(skeleton: Skeleton) -> list[str]:
    """Names of the tensors, in order, each once."""
    return [leaf["name"] for leaf in _leaves(skeleton)]


def _leaves(part: Skeleton) -> Iterator[dict[str, Any]]:
    if "leaf" in part:
        yield part
    for kind in ("dict", "list", "tuple"):
        held = part.get(kind, [])
        for one in held.values() if isinstance(held, Mapping) else held:
            yield from _leaves(one)


def rebuild(part: Skeleton, leaves: Sequence[Leaf]) -> Any:
    """The output that a skeleton stands for: dicts, lists and tuples."""
    if "leaf" in part:
        return leaves[part["leaf"]]
    if "dict" in part:
        return {name: rebuild(one, leaves) for name, one in part["dict"].items()}
    if "list" in part:
        return [rebuild(one, leaves) for one in part["list"]]
    if "tuple" in part:
        return tuple(rebuild(one, leaves) for one in part["tuple"])
    return part["value"]
