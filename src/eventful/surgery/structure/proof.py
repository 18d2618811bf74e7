"""Proves a block's description: the block and the description are run on random tokens.

The proof runs on a copy in double precision with random weights. With its own weights a wrong
description could pass: a layer scale of 1e-5 hides the whole attention, a projection that starts
at zero hides the order of q, k and v.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from eventful.rules.spec import BlockSpec
from eventful.surgery.adapter import Mismatch
from eventful.surgery.adapters.origin import forward_of
from eventful.surgery.clones import own_forward
from eventful.surgery.outputs import first_tensor
from eventful.surgery.part_hooks import hooks_of
from eventful.surgery.structure.arguments import Call, caller, optional
from eventful.surgery.structure.fingerprint import Alike, Fingerprint, KeptFingerprint
from eventful.surgery.structure.randomness import Draws, same_random_state
from eventful.surgery.structure.recipe import Recipe
from eventful.surgery.structure.roles import recipes, returned_length
from eventful.surgery.structure.state import refuse_lost_writes, runs
from eventful.surgery.structure.suspects import suspects
from eventful.surgery.structure.tape import record
from eventful.surgery.structure.twins import generator, healthy_twin, louder, other_weights

_TOLERANCE = 1e-5
_ROUNDED = 1e-3  # in single precision: it shows that dtypes have no code of their own
_GRID = (3, 5)  # tokens of the recorded run; unlikely to be a number of channels or heads
_OTHER = (5, 2)  # tokens of the other runs
_BATCH = 2
# Weights, and tokens, times these: clamps and caps show at large values alone. Of q and k it is
# less, or every softmax would be of one key, whatever the others are.
_LOUD, _LOUD_SCORES = 64.0, 8.0
_ROWS = 512  # queries whose attention is computed at once
_MOST_KEPT = 4  # verdicts for one weight: its block before and after changes of settings

# What a module keeps about its hooks.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
# Hooks on the modules of the whole process.
_EVERYWHERE = (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)

# Verdicts by the first weight of a block; and by what blocks share besides weights, as a hint.
_known: MutableMapping[Tensor, list[tuple[KeptFingerprint, Recipe | str]]]
_known = WeakTensorKeyDictionary()
_alike: Alike[Recipe | str] = Alike()
_lock = threading.Lock()


class Momentary(Mismatch):
    """A refusal that may not hold for a later call, and is not kept."""


def described(block: nn.Module) -> Recipe:
    """The proven description of a block. Every block is proven, and again when it has changed.

    Raises:
        Mismatch: there is none; the message says why.
    """
    first = next(block.parameters(), None)
    if first is None:
        raise Mismatch("it has no linear layers")
    now = Fingerprint.of(block)
    with _lock:
        kept = _known.get(first, [])
        known = next((verdict for before, verdict in kept if before.fits(now)), None)
    if known is None:
        known = _verdict(block, now)
        with _lock:
            _known[first] = [(now.kept(), known), *_known.get(first, [])][:_MOST_KEPT]
    if isinstance(known, str):
        raise Mismatch(known)
    return known


def _verdict(block: nn.Module, now: Fingerprint) -> Recipe | str:
    """The description, or the reason why there is none.

    The description of a block that differs in its weights alone is tried first. If that block was
    refused, so is this one.
    """
    with _lock:
        hint = _alike.get(now)
    if isinstance(hint, str):
        return hint
    found: Recipe | str
    try:
        with _undisturbed():
            found = _describe(block, hint)
    except Momentary:
        raise
    except Mismatch as reason:
        found = f"{reason}{suspects(block)}"
        if any(_EVERYWHERE):
            raise Momentary(found) from reason
    with _lock:
        _alike.put(now, found)
    return found


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Whatever surrounds a proof does not change it, and it changes nothing outside."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())  # one may leave the arithmetic out
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(same_random_state())
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _without_draws() -> Iterator[None]:
    """Raise if random numbers are drawn."""
    with Draws() as draws:
        yield
    if draws.seen:
        raise Momentary("it draws random numbers, also in evaluation mode")


def _describe(block: nn.Module, hint: Recipe | None) -> Recipe:
    replaced = [type(m).__name__ for m in block.modules() if forward_of(m) == "" and not _lent(m)]
    if replaced:
        raise Mismatch(f"the forward of its {replaced[0]} was replaced")
    call = caller(block)
    dim = _dim(block)
    twin = _twin(block)
    if hint is not None and difference(twin, hint, call) <= _TOLERANCE:
        return hint
    fresh = Fingerprint.of(twin)
    reasons: list[Mismatch] = []
    for shape in ((_BATCH, _GRID[0] * _GRID[1], dim), (_BATCH, *_GRID, dim)):
        tokens = torch.randn(shape, generator=generator(1), dtype=torch.float64)
        given = tokens.clone()
        try:
            with _without_draws():
                tape = record(twin, partial(call, twin, tokens), tokens)
        except Momentary:
            raise
        except Exception as error:  # the block's own code on tokens it may not take
            reasons.append(
                Mismatch(f"it does not run on tokens alone{optional(block)}: {_said(error)}")
            )
            continue
        if tape.output.shape != tokens.shape:
            reasons.append(Mismatch(f"it makes {_shape(tape.output)} of {_shape(tokens)}"))
            continue
        if not torch.equal(tokens, given):
            raise Mismatch("it writes into the tokens it gets")
        writes = tuple(fresh.differences(Fingerprint.of(twin)))
        found = _first_proven(twin, recipes(twin, tape), call, tape.masked)
        refuse_lost_writes(block, twin, writes)
        return replace(found, writes=writes)
    raise reasons[0]


def _twin(block: nn.Module) -> nn.Module:
    try:
        return healthy_twin(block)
    except Exception as error:  # whatever a library raises in a copy or a change of dtype
        raise Mismatch(f"a copy of it cannot be made for the proof: {_said(error)}") from error


def differs_with(block: nn.Module, recipe: Recipe, shape: tuple[int, ...]) -> str | None:
    """Why a block's description does not hold for tokens of a shape; None if it does.

    Args:
        shape: without the batch: (N, D), or (h, w, D).

    Raises:
        Momentary: it draws random numbers.
    """
    try:
        with _undisturbed():
            twin, call, tokens = _twin(block), caller(block), _tokens(recipe, shape[:-1], 5)[:1]
            off = _off(twin, recipe, _own(twin, recipe, call, tokens), tokens)
            single, few = twin.float(), _tokens(recipe, _OTHER, 2).float()
            rounded = _off(single, recipe, _own(single, recipe, call, few), few)
    except Momentary:
        raise
    except Mismatch as reason:
        return str(reason)
    if not off <= _TOLERANCE:
        tokens_given = " x ".join(map(str, shape[:-1]))
        return (
            f"with {tokens_given} tokens, as in the model, {_found(off)} what attention over all "
            f"of them gives, computed from its parts{suspects(block)}"
        )
    if not rounded <= _ROUNDED:
        return f"in single precision {_found(rounded)} what its parts give{suspects(block)}"
    return None


def refuse_hooks(block: nn.Module, recipe: Recipe) -> None:
    """Raise `Mismatch` if a hook on a part that a stream does not call changes the block's result.

    It is not kept: hooks come and go. Where there are no such hooks, nothing is run.
    """
    called = recipe.called(block)
    hooked = {
        name: part
        for name, part in block.named_modules()
        if name and hooks_of(part) and not runs(called, name)
    }
    if not hooked:
        return
    with _undisturbed():
        twin, call, tokens = _twin(block), caller(block), _tokens(recipe, _OTHER, 2)
        usual = _own(twin, recipe, call, tokens)
        for name, part in hooked.items():
            found = _hooked(twin, name, part, partial(call, twin, tokens))
            # Without hooks, torch's own layers compute in another order.
            if usual is None or found is None or not _apart(found, usual) <= _TOLERANCE:
                raise Mismatch(
                    f"a hook on its `{name}` changes its result; a stream does not run it"
                )


def _hooked(twin: nn.Module, name: str, part: nn.Module, run: Callable[[], Any]) -> Tensor | None:
    """What a twin makes of tokens with the hooks that a part of the block has."""
    copy = twin.get_submodule(name)
    for kind in _HOOKS:
        getattr(copy, kind).update(getattr(part, kind))
    try:
        return first_tensor(run())
    except Exception as error:  # the hook's own code
        raise Mismatch(f"a hook on its `{name}` cannot be tried: {_said(error)}") from error
    finally:
        for kind in _HOOKS:
            getattr(copy, kind).clear()


def _apart(one: Tensor, two: Tensor) -> float:
    """How far two results are from each other, relative to the largest value of the second."""
    if one.shape != two.shape:
        return math.inf
    off = float((one - two).abs().max() / two.abs().max().clamp_min(1e-30))
    return math.inf if math.isnan(off) else off


def _found(off: float) -> str:
    if math.isinf(off):
        return "it does not run, or returns something else than"
    return f"it differs by {off:.1e} of the largest value from"


def _lent(module: nn.Module) -> bool:
    """Whether a module's forward is eventful's own."""
    return own_forward(vars(module).get("forward"))


def _said(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


def _first_proven(
    twin: nn.Module, candidates: Iterator[Recipe], call: Call, masked: bool
) -> Recipe:
    """The first description that computes what the block computes."""
    least = math.inf
    for recipe in candidates:
        off = difference(twin, recipe, call)
        if off <= _TOLERANCE:
            return recipe
        least = min(least, off)
    if least == math.inf:
        raise Mismatch("the widths of its q, k and v do not fit its heads")
    raise Mismatch(
        "norms, q, k, v, softmax attention, projection and MLP, computed from its parts, differ "
        f"from its own forward by {least:.1e} of the largest value on random tokens"
        + (". Its attention gets a mask or a bias" if masked else "")
    )


def difference(twin: nn.Module, recipe: Recipe, call: Call) -> float:
    """How far the description is from the block on random tokens, relative to the largest value.

    Once with values of usual size, then with large ones, where activations reach their limits,
    then with other weights.

    Raises:
        Mismatch: the block depends on random numbers, or on earlier calls.
    """
    tokens = _tokens(recipe, _OTHER, 2)
    tokens[:, 1] = 0  # as padding is
    first = _own(twin, recipe, call, tokens)
    if first is None:
        raise Mismatch(f"it does not run on {_shape(tokens)} tokens as it does on more")
    off = _off(twin, recipe, first, tokens)
    if not off <= _TOLERANCE:
        return off
    before = Fingerprint.of(twin).without_weights()
    large = _tokens(recipe, _OTHER, 3) * _LOUD
    with louder(twin, lambda name: _LOUD_SCORES if name.startswith(recipe.qkv) else _LOUD):
        off = max(off, _off(twin, recipe, _own(twin, recipe, call, large), large))
    with other_weights(twin):
        off = max(off, _off(twin, recipe, _own(twin, recipe, call, tokens), tokens))
    again = _own(twin, recipe, call, tokens)
    if again is None or not torch.equal(first, again):
        # It may also draw random numbers that torch does not see.
        raise Momentary("it gives another result when it is called again with the same tokens")
    changed = before.difference(Fingerprint.of(twin).without_weights())
    if changed is not None:
        raise Mismatch(f"its `{changed}` changes with every call")
    return off


def _tokens(recipe: Recipe, grid: tuple[int, ...], seed: int) -> Tensor:
    """Random tokens; a grid of them is flat for blocks that take them so."""
    places = grid if recipe.spatial else (math.prod(grid),)
    shape = (_BATCH, *places, recipe.dim)
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def _own(twin: nn.Module, recipe: Recipe, call: Call, tokens: Tensor) -> Tensor | None:
    """What the block itself makes of tokens; None if it does not take them."""
    try:
        with _without_draws():
            result = call(twin, tokens.clone())
        return first_tensor(result) if returned_length(result) == recipe.returns else None
    except Momentary:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, Mismatch):
        return None


def _off(twin: nn.Module, recipe: Recipe, own: Tensor | None, tokens: Tensor) -> float:
    """How far the description is from the block's own result, relative to the largest value."""
    if own is None or own.shape != tokens.shape:
        return math.inf
    try:
        got = computed(recipe.spec(twin), tokens.flatten(1, -2)).reshape(own.shape)
    except (RuntimeError, ValueError, TypeError):
        return math.inf
    return _apart(got, own)


def computed(spec: BlockSpec, x: Tensor) -> Tensor:
    """What the update rules compute where every token is selected, the tokens in two parts."""
    index = torch.arange(x.shape[1])[None].expand(len(x), -1)
    parts = [(x[:, a:b], index[:, a:b]) for a, b in ((0, 4), (4, x.shape[1]))]
    qkv = [spec.qkv(spec.norm1(tokens), at, None) for tokens, at in parts]
    q, k, v = (
        torch.cat(part, dim=1).unflatten(-1, (spec.heads, spec.head_dim)).transpose(1, 2)
        for part in zip(*qkv, strict=True)
    )
    attended = torch.cat(
        [
            (rows @ k.transpose(-1, -2) * spec.scale).softmax(dim=-1) @ v
            for rows in q.split(_ROWS, dim=2)
        ],
        dim=2,
    )
    attended = attended.transpose(1, 2).flatten(2)
    results = []
    for (tokens, _), (begin, end) in zip(parts, ((0, 4), (4, x.shape[1])), strict=True):
        y = tokens + spec.projected(attended[:, begin:end])
        results.append(y + spec.transformed(spec.norm2(tokens if spec.parallel else y)))
    return torch.cat(results, dim=1)


def _dim(block: nn.Module) -> int:
    """The width of a block's tokens: that of its first norm, else of its first linear layer."""
    for module in block.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
        if isinstance(module, nn.MultiheadAttention):
            return module.embed_dim
    raise Mismatch("it has no linear layers")
