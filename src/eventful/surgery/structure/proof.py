"""Proves a block's description: the block and the description are run on random tokens.

The proof runs on a copy in double precision with random weights. With its own weights a wrong
description could pass: a layer scale of 1e-5 hides the whole attention, a projection that starts
at zero hides the order of q, k and v.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from eventful.rules.spec import BlockSpec
from eventful.surgery.adapter import Foreign, Mismatch
from eventful.surgery.adapters.origin import forward_of
from eventful.surgery.clones import bare_tree, own_forward
from eventful.surgery.structure.recipe import Recipe
from eventful.surgery.structure.roles import recipes
from eventful.surgery.structure.suspects import suspects
from eventful.surgery.structure.tape import first_tensor, record

_TOLERANCE = 1e-5
_GRID = (3, 5)  # tokens of the proof; a number that is unlikely to be one of channels or heads
_BATCH = 2
# Arguments of a block that switch something on, or may be None.
_FREE = ("mask", "output_", "use_cache", "past_key", "return_", "cache", "bias", "causal", "drop")

_known: dict[Hashable, Recipe | str] = {}
_lock = threading.Lock()


def described(block: nn.Module) -> Recipe:
    """The proven description of a block; blocks of one structure are proven once.

    Raises:
        Mismatch: there is none; the message says why.
    """
    key = structure_key(block)
    with _lock:
        known = _known.get(key)
    if known is None:
        try:
            with _disable_current_modes():  # one of them may leave the arithmetic out
                known = _describe(block)
        except Mismatch as reason:
            known = f"{reason}{suspects(block)}"
        with _lock:
            _known[key] = known
    if isinstance(known, str):
        raise Mismatch(known)
    return known


def structure_key(block: nn.Module) -> Hashable:
    """What the description of a block depends on: classes, shapes and settings, not weights."""
    return tuple(
        (
            name,
            type(module),
            forward_of(module) != "",
            tuple(
                (key, None if value is None else tuple(value.shape))
                for key, value in (*module._parameters.items(), *module._buffers.items())
            ),
            _settings(module),
        )
        for name, module in block.named_modules()
    )


def _settings(module: nn.Module) -> Hashable:
    """Numbers, flags and functions among a module's attributes; dropout does nothing here."""
    if "drop" in type(module).__name__.lower():
        return ()
    found: list[Hashable] = []
    for key, value in vars(module).items():
        if key in ("training", "forward") or key.startswith("_"):
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if all(part is None or isinstance(part, bool | int | float | str) for part in parts):
            found.append((key, value))
        elif hasattr(value, "_attn_implementation"):
            found.append((key, type(value), value._attn_implementation))
        elif callable(value):
            found.append((key, getattr(value, "__qualname__", type(value).__qualname__)))
    return tuple(found)


def _describe(block: nn.Module) -> Recipe:
    replaced = [type(m).__name__ for m in block.modules() if forward_of(m) == "" and not _lent(m)]
    if replaced:
        raise Mismatch(f"the forward of its {replaced[0]} was replaced")
    call = _caller(block)
    dim = _dim(block)
    try:
        twin = healthy_twin(block)
    except Exception as error:  # whatever a library raises in a copy or a change of dtype
        raise Mismatch(f"a copy of it cannot be made for the proof: {_said(error)}") from error
    reasons: list[Mismatch] = []
    for shape in ((_BATCH, _GRID[0] * _GRID[1], dim), (_BATCH, *_GRID, dim)):
        tokens = torch.randn(shape, generator=_generator(1), dtype=torch.float64)
        try:
            tape = record(twin, partial(call, twin, tokens), tokens)
        except Exception as error:  # the block's own code on tokens it may not take
            reasons.append(
                Mismatch(f"it does not run on tokens alone{_optional(block)}: {_said(error)}")
            )
            continue
        if tape.output.shape != tokens.shape:
            reasons.append(Mismatch(f"it makes {_shape(tape.output)} of {_shape(tokens)}"))
            continue
        return _first_proven(twin, recipes(twin, tape), call)
    raise reasons[0]


def _lent(module: nn.Module) -> bool:
    """Whether a module's forward is eventful's own."""
    return own_forward(vars(module).get("forward"))


def _optional(block: nn.Module) -> str:
    """The arguments that a block may need beside the tokens."""
    names = list(inspect.signature(type(block).forward).parameters)[2:]
    names = [name for name in names if not any(word in name for word in (*_FREE, "args"))]
    return f", without {', '.join(f'`{name}`' for name in names)}" if names else ""


def _said(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


def _first_proven(
    twin: nn.Module, candidates: Any, call: Callable[[nn.Module, Tensor], Any]
) -> Recipe:
    """The first description that computes what the block computes."""
    least = float("inf")
    for recipe in candidates:
        off = difference(twin, recipe, call)
        if off <= _TOLERANCE:
            found: Recipe = recipe
            return found
        least = min(least, off)
    if least == float("inf"):
        raise Mismatch("the widths of its q, k and v do not fit its heads")
    raise Mismatch(
        "norms, q, k, v, softmax attention, projection and MLP, computed from its parts, differ "
        f"from its own forward by {least:.1e} of the largest value on random tokens"
    )


def difference(twin: nn.Module, recipe: Recipe, call: Callable[[nn.Module, Tensor], Any]) -> float:
    """How far the description is from the block on random tokens, relative to the largest value.

    The maps are run on some tokens at a time: a map that mixes tokens is found out.
    """
    grid = (_GRID[1], _GRID[0] + 1)  # another number of tokens than that of the recorded run
    shape = (_BATCH, *grid, recipe.dim) if recipe.spatial else (_BATCH, 17, recipe.dim)
    tokens = torch.randn(shape, generator=_generator(2), dtype=torch.float64)
    try:
        with torch.no_grad():
            expected = first_tensor(call(twin, tokens))
            got = computed(recipe.spec(twin), tokens.flatten(1, -2))
    except (RuntimeError, ValueError, TypeError):
        return float("inf")
    assert expected is not None
    expected = expected.reshape(got.shape)
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def computed(spec: BlockSpec, x: Tensor) -> Tensor:
    """What the update rules compute where every token is selected, the tokens in two parts."""
    index = torch.arange(x.shape[1])[None].expand(len(x), -1)
    parts = [(x[:, a:b], index[:, a:b]) for a, b in ((0, 4), (4, x.shape[1]))]
    qkv = [spec.qkv(spec.norm1(tokens), at, None) for tokens, at in parts]
    q, k, v = (
        torch.cat(part, dim=1).unflatten(-1, (spec.heads, spec.head_dim)).transpose(1, 2)
        for part in zip(*qkv, strict=True)
    )
    weights = (q @ k.transpose(-1, -2) * spec.scale).softmax(dim=-1)
    attended = (weights @ v).transpose(1, 2).flatten(2)
    results = []
    for (tokens, _), (begin, end) in zip(parts, ((0, 4), (4, x.shape[1])), strict=True):
        y = tokens + spec.projected(attended[:, begin:end])
        results.append(y + spec.transformed(spec.norm2(tokens if spec.parallel else y)))
    return torch.cat(results, dim=1)


def healthy_twin(block: nn.Module) -> nn.Module:
    """A copy on the CPU in double precision whose random weights are all of usual size."""
    twin = copy.deepcopy(bare_tree(block)).to(device="cpu", dtype=torch.float64).eval()
    make = _generator(0)
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            weight.requires_grad_(False)
            noise = torch.randn(weight.shape, generator=make, dtype=weight.dtype)
            if weight.dim() > 1 and min(weight.shape) > 1:
                weight.copy_(noise * weight[0].numel() ** -0.5)
            elif name.rpartition(".")[2].endswith("bias"):
                weight.copy_(0.2 * noise)
            else:  # of a norm, or a layer scale
                weight.copy_(1 + 0.2 * noise)
    return twin


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _dim(block: nn.Module) -> int:
    """The width of a block's tokens: that of its first norm, else of its first linear layer."""
    for module in block.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        if isinstance(module, nn.MultiheadAttention):
            return module.embed_dim
    raise Mismatch("it has no linear layers")


def _caller(block: Foreign) -> Callable[[nn.Module, Tensor], Any]:
    """Calls a block with tokens alone; raises `Mismatch` for an argument it needs beside them."""
    parameters = list(inspect.signature(type(block).forward).parameters.values())[1:]
    empty: dict[str, bool | None] = {}
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is not parameter.empty:
            continue
        if not any(word in parameter.name for word in _FREE):
            raise Mismatch(f"its forward needs `{parameter.name}` beside the tokens")
        empty[parameter.name] = False if parameter.name.startswith("output_") else None
    return lambda module, tokens: module(tokens, **empty)
