"""The arguments of a block's forward beside the tokens: what proofs pass, and what models do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from eventful.surgery.adapter import Foreign, Mismatch

# Arguments of a block that switch something on, or may be None.
_FREE = ("mask", "output_", "use_cache", "past_key", "return_", "cache", "bias", "causal", "drop")

Call = Callable[[nn.Module, Tensor], Any]

# What proofs pass to blocks, by class, and by the forward that the class had.
_arguments: MutableMapping[type[nn.Module], tuple[ref[Any], dict[str, Any]]] = WeakKeyDictionary()


def proven_arguments(block: nn.Module) -> Mapping[str, Any]:
    """What the proof passes for each argument of a block's forward; the first is the tokens."""
    forward = type(block).forward
    known = _arguments.get(type(block))
    if known is None or known[0]() is not forward:
        known = _arguments[type(block)] = (ref(forward), _arguments_of(forward))
    return known[1]


def _arguments_of(forward: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        known = parameter.default is not parameter.empty
        off = False if parameter.name.startswith("output_") else None
        found[parameter.name] = parameter.default if known else off
    return found


def caller(block: Foreign) -> Call:
    """Calls a block with tokens alone; raises `Mismatch` for an argument it needs beside them."""
    parameters = list(inspect.signature(type(block).forward).parameters.values())[2:]
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    for name in needed:
        if not any(word in name for word in _FREE):
            raise Mismatch(f"its forward needs `{name}` beside the tokens")
    passed = proven_arguments(block)
    empty = {name: passed[name] for name in needed}
    return lambda module, tokens: module(tokens, **empty)


def optional(block: nn.Module) -> str:
    """The arguments that a block may need beside the tokens."""
    names = list(inspect.signature(type(block).forward).parameters)[2:]
    names = [name for name in names if not any(word in name for word in (*_FREE, "args"))]
    return f", without {', '.join(f'`{name}`' for name in names)}" if names else ""


def extra_argument(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """The name of an argument that says something beside the tokens; None without one.

    An argument says nothing if it is what the proof passed, see `proven_arguments`.
    """
    proven = proven_arguments(block)
    names = [*proven]
    last = names[-1] if names else "tokens"
    given = [(names[at] if at < len(names) else last, value) for at, value in enumerate(args)][1:]
    given += [(name, value) for name, value in kwargs.items() if not names or name != names[0]]
    return next((n for n, value in given if not _says_nothing(value, proven.get(n))), None)


def _says_nothing(value: Any, proven: Any) -> bool:
    if value is proven:
        return True
    if value is None or value is False:
        return proven is None or proven is False
    if isinstance(value, dict | tuple | list) and not value:
        return proven is None or (type(proven) is type(value) and not proven)
    plain = type(value) in (bool, int, float, str) and type(value) is type(proven)
    return plain and bool(value == proven)
