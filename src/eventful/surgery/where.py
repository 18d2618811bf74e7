"""`where` of `convert`: a function, a part of the model by its name, or its vision tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from eventful.errors import ConfigError, NoMatchError
from eventful.surgery.adapters import Adapter
from eventful.surgery.matching import known_trunks

Where = Callable[[str, nn.Module], bool]

VISION = "vision"
# In names of parts that see pictures, and in names of parts that do not.
_SEES = ("vision", "visual", "image", "pixel")
_OTHER = ("language", "text", "decoder", "audio", "speech", "lm")


def checked_where(where: object, model: nn.Module) -> Where | None:
    """The function (name, block) that is true for blocks to convert; None for all.

    Args:
        where: such a function; "vision", for the vision tower; or a name in the model, of a part
            that holds the blocks.

    Raises:
        NoMatchError: a name that fits no block; the message lists the trunks of the model.
    """
    if where is None:
        return None
    if isinstance(where, str):
        return _by_name(where, list(known_trunks(model)))
    if not callable(where):
        raise ConfigError(
            "where is 'vision', the name of a part of the model, or a function of (name, block) "
            f"that is true for blocks to convert; got {where!r}. E.g. where='vision_tower', or "
            "where=lambda name, block: name != 'blocks.0'."
        )
    return where


def _by_name(where: str, trunks: list[tuple[str, nn.Module, Adapter]]) -> Where | None:
    if not trunks:
        return None  # then nothing is converted, and `convert` says why
    names = {
        f"{name}.{short}".lstrip("."): name
        for name, trunk, adapter in trunks
        for short, _ in adapter.blocks(trunk)
    }
    if where == VISION:
        towers = _vision([name for name, _, _ in trunks])
        fits = {block for block, trunk in names.items() if trunk in towers}
    else:
        fits = {block for block in names if f".{where}." in f".{block}."}
    if not fits:
        found = ", ".join(
            f"{name or 'the model itself'} ({adapter.name})" for name, _, adapter in trunks
        )
        raise NoMatchError(
            f"where={where!r} fits no block of the model. Trunks found: {found}. Pass one of these "
            "names, or a part of it between dots."
        )
    return Named(frozenset(fits))


@dataclass(frozen=True)
class Named:
    """True for blocks with one of these names."""

    names: frozenset[str]

    def __call__(self, name: str, block: nn.Module) -> bool:
        """Whether the block of this name is to be converted."""
        return name in self.names


def _vision(trunks: list[str]) -> list[str]:
    """The trunks that see pictures, by their names: of several, those that are named for it."""
    named = [name for name in trunks if _has(name, _SEES)]
    return named or [name for name in trunks if not _has(name, _OTHER)]


def _has(name: str, words: tuple[str, ...]) -> bool:
    """Whether a word of a dotted name is, or begins with, one of `words`."""
    parts = name.replace(".", "_").split("_")
    return any(
        part == word or (len(word) > 2 and part.startswith(word))
        for part in parts
        for word in words
    )
