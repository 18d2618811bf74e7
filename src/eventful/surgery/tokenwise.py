"""Finds quantised blocks that give a token another result when other tokens run with it.

Dynamic quantisation with one activation scale per tensor is the usual case: the scale depends on
which tokens run, so a token recomputed alone differs from the same token recomputed with others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from eventful.rules.spec import BlockSpec

_TOKENS = 7
_OUTLIER = (
    1000.0  # times larger than the other tokens, so that with a shared scale they round to zero
)
_TOLERANCE = 1e-3
# Of the full name of a module's or a tensor's class, e.g. torch.ao.nn.quantized.dynamic.Linear.
_QUANTISED = re.compile(
    r"quant|torchao|bitsandbytes|transformer_engine|\bhqq|\bgptq|\bawq|fp8|float8|int8|int4|8bit|4bit",
    re.IGNORECASE,
)
_ADVICE = (
    "Quantise the weights only, or use one activation scale per token instead of one per tensor"
)


def mixed_tokens(block: nn.Module, spec: Callable[[nn.Module], BlockSpec]) -> str | None:
    """Why the maps of a quantised block are not token-wise; None if they are.

    A block without quantised parts is assumed to be token-wise. Of other blocks a copy is run,
    because some quantised layers keep statistics of their inputs.

    Args:
        spec: describes a block, see `Adapter.spec`.
    """
    named = ", ".join(sorted(set(_quantised(block))))
    if not named:
        return None
    try:
        twin = _copy(block)
        with torch.no_grad():
            mixing = [name for name, one, two in _compare(spec(twin), twin) if _differ(one, two)]
    except Exception as error:  # whatever a library raises for tokens it cannot take
        return (
            f"its quantised parts ({named}) cannot be run on a few tokens to see whether each "
            f"token is treated alone: {type(error).__name__}: {error}. {_ADVICE}"
        )
    if mixing:
        return (
            f"its quantised parts ({named}) give a token another result when other tokens run "
            f"with it (in {', '.join(mixing)}), so a stream would drift. {_ADVICE}"
        )
    return None


def _quantised(module: nn.Module) -> Iterator[str]:
    """Quantised parts inside a module: names of classes, or of dtypes."""
    if _is_quantised(module):
        yield _full_name(module)
        return
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is None:
            continue
        if _is_quantised(tensor):
            yield _full_name(tensor)
        elif tensor.is_quantized or _is_narrow(tensor):
            yield f"{type(module).__name__} with {tensor.dtype}".replace("torch.", "")
    for child in module.children():
        yield from _quantised(child)


def _is_quantised(thing: nn.Module | Tensor) -> bool:
    """Whether a class name looks like quantisation; torch.nn's own classes compute with floats."""
    name = _full_name(thing)
    return not name.startswith("torch.nn.modules.") and _QUANTISED.search(name) is not None


def _is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix with one byte per element."""
    return tensor.element_size() == 1 and tensor.dtype != torch.bool and tensor.dim() > 1


def _full_name(thing: nn.Module | Tensor) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _copy(block: nn.Module) -> nn.Module:
    """A copy of a block, with the forward of its class."""
    forward = vars(block).get("forward")
    twin = copy.deepcopy(block, {} if forward is None else {id(forward): forward})
    if (
        getattr(forward, "block", None) is block
    ):  # eventful's own forward, which belongs to the converted model
        del twin.forward
    return twin.eval()


def _compare(spec: BlockSpec, block: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The output of each map for some tokens, alone and beside a token with a huge value."""
    wide = (t for t in _tensors(block) if t.is_floating_point() and t.element_size() > 1)
    like = next(wide, torch.empty(0))
    for name, width, run in (
        ("qkv", spec.dim, lambda x: torch.cat(_run_qkv(spec, x), dim=-1)),
        ("projection", spec.heads * spec.head_dim, spec.project),
        ("mlp", spec.dim, spec.mlp),
    ):
        make = torch.Generator().manual_seed(0)
        tokens = torch.randn(1, _TOKENS + 1, width, generator=make).to(like.device, like.dtype)
        tokens[:, -1, 0] = _OUTLIER  # in one channel, or a norm would hide it
        yield name, run(tokens[:, :-1].clone()), run(tokens)[:, :-1]


def _run_qkv(spec: BlockSpec, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return spec.qkv(tokens, index, None)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _differ(one: Tensor, two: Tensor) -> bool:
    """Whether two outputs differ beyond rounding."""
    most = max(_TOLERANCE, 4 * torch.finfo(one.dtype).eps)
    return not bool((one - two).abs().max() <= most * one.abs().max())
