"""Finds a block's parts in a recorded run: candidates for what each of them does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eventful.surgery.adapter import Mismatch
from eventful.surgery.structure.recipe import ACTIVATIONS, Form, Gated, Recipe, norm_width, value
from eventful.surgery.structure.tape import Call, Tape, same

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads", "nhead", "n_head", "nheads")
_SCALES = ("scale", "scaling")
_CLOSE = 1e-6

# The name of a layer scale, None without one, False where a sum is not as expected.
Factor = str | None | Literal[False]


@dataclass
class _Half:
    """One residual half of a block: parts in a row, the tensor they begin with, and the result."""

    names: tuple[str | Gated, ...]
    given: Tensor
    result: Tensor
    start: int
    end: int


def recipes(block: nn.Module, tape: Tape) -> Iterator[Recipe]:
    """Descriptions of a block that its recorded run suggests, the likeliest first.

    Raises:
        Mismatch: a part is missing; the message names it.
    """
    if tape.causal:
        raise Mismatch("its attention is causal")
    roles = _Roles(block, tape)
    qkv, project = roles.attention()
    rough = roles.frame(qkv, project)
    first: Any = qkv[0].module
    widths = [3 * first.embed_dim] if roles.is_mha(qkv[0]) else [_width(call) for call in qkv]
    for heads in roles.heads(qkv[0]):
        for order in roles.orders(qkv):
            packings = ("part", "head", "channel") if len(order) == 1 else ("part",)
            for packing in packings:
                found = _sized(widths, heads, packing)
                if found is None:
                    continue
                base = replace(
                    rough,
                    heads=heads,
                    head_dim=found,
                    qkv=order,
                    packing=packing,
                    norms=roles.norms(qkv, project, heads, found),
                )
                for scale in roles.scales(found):
                    yield replace(base, scale=scale)


def _width(call: Call) -> int:
    assert call.result is not None
    return call.result.shape[-1]


def _sized(widths: list[int], heads: int, packing: str) -> int | None:
    """Channels of a head; None if the layers' widths do not allow it."""
    if len(widths) > 1:
        return widths[0] // heads if widths[0] % heads == 0 else None
    if widths[0] % (3 * heads) == 0:
        return widths[0] // (3 * heads)
    return None


class _Roles:
    """The calls of a recorded run, and questions about them."""

    def __init__(self, block: nn.Module, tape: Tape) -> None:
        self.block, self.tape, self.calls = block, tape, tape.calls
        self.dim = tape.tokens.shape[-1]
        self.linears: list[Call] = []
        for call in sorted(self.calls, key=lambda call: call.start):
            unit = call.is_linear or self.is_mha(call)
            if unit and not any(known.covers(call) for known in self.linears):
                self.linears.append(call)

    @staticmethod
    def is_mha(call: Call) -> bool:
        """Whether a call is of torch's own attention, with one matrix for q, k and v."""
        module = call.module
        return isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None

    def attention(self) -> tuple[list[Call], _Half]:
        """The layers of q, k and v, and what follows attention."""
        linears = self.linears
        if not linears:
            raise Mismatch("it has no linear layers")
        first = linears[0]
        if self.is_mha(first):
            attention: Any = first.module
            if attention.bias_k is not None or attention.add_zero_attn:
                raise Mismatch("its attention has keys that belong to no token")
            out = Call(f"{first.name}.out_proj", attention.out_proj, None, first.start)
            out.result, out.end = first.result, first.end
            return [first], self._extended((out.name,), first)
        group = [first]
        for call in linears[1:3]:
            if not same(call.given, first.given):
                break
            group.append(call)
        if len(group) + 1 > len(linears):
            raise Mismatch("it has no layer after its attention")
        project = linears[len(group)]
        inner = self._before(project, group[-1].end)
        return group, self._extended((*inner, project.name), project)

    def _before(self, call: Call, after: int) -> tuple[str, ...]:
        """Parts between attention and the layer after it, such as a norm."""
        maker = self.maker(call.given, after)
        return () if maker is None else (*self._before(maker, after), maker.name)

    def _extended(self, names: tuple[str | Gated, ...], last: Call) -> _Half:
        """Parts in a row, and those that follow them before the residual sum."""
        given, result, end = last.given, last.result, last.end
        while True:
            call = self._taker(result, end)
            if call is None:
                assert given is not None
                assert result is not None
                return _Half(names, given, result, last.start, end)
            names, result, end = (*names, call.name), call.result, call.end

    def _taker(self, tensor: Tensor | None, after: int) -> Call | None:
        """The call that got a tensor and made another of it, without linear layers."""
        for call in self.calls:
            known = call.start > after and call.alone and same(call.given, tensor)
            if not known or same(call.result, tensor) or self._has_linear(call):
                continue
            if call.result is not None and call.result.shape[-1] == self.dim:
                return call
        return None

    def _has_linear(self, call: Call) -> bool:
        return any(call.covers(linear) for linear in self.linears)

    def maker(self, tensor: Tensor | None, after: int = 0) -> Call | None:
        """The outermost call that made a tensor of another, without linear layers."""
        for call in self.calls:
            made = call.start > after and same(call.result, tensor)
            if made and not same(call.given, tensor) and not self._has_linear(call):
                return call
        return None

    def heads(self, first: Call) -> list[int]:
        """Numbers of heads: those that were seen, else those that attributes state."""
        if self.is_mha(first):
            module: Any = first.module
            return [module.num_heads]
        found = list(dict.fromkeys(self.tape.heads))
        for module in self.block.modules():
            for holder in (module, getattr(module, "config", None)):
                counts = [getattr(holder, name, None) for name in _HEADS]
                found += [c for c in counts if isinstance(c, int) and c > 0 and c not in found]
        if not found:
            raise Mismatch("its number of heads is not known")
        return found

    def scales(self, size: int) -> list[float]:
        """Factors on the query-key product."""
        found = [*self.tape.scales, size**-0.5]
        for module in self.block.modules():
            held = [getattr(module, name, None) for name in _SCALES]
            found += [float(scale) for scale in held if isinstance(scale, float | int)]
        return list(dict.fromkeys([*found, 1.0]))

    def orders(self, qkv: list[Call]) -> list[tuple[str, ...]]:
        """The layers in the order q, k, v: by name where names tell, else every order."""
        names = tuple(call.name for call in qkv)
        if len(names) == 1:
            return [names]
        leaves = [name.rpartition(".")[2].lower().removeprefix("w").lstrip("_") for name in names]
        letters = [leaf[:1] for leaf in leaves]
        if sorted(letters) == sorted(set("qkv") if len(names) == 3 else set("qk")):
            order = "qkv" if len(names) == 3 else "qk"
            return [tuple(names[letters.index(letter)] for letter in order)]
        return list(permutations(names))

    def norms(
        self, qkv: list[Call], project: _Half, heads: int, size: int
    ) -> tuple[str | None, str | None]:
        """The norms of q and of k."""
        between = [
            call
            for call in self.calls
            if qkv[0].end < call.start < project.start
            and norm_width(call.module) in (size, heads * size)
            and not call.is_linear
            and call.name not in project.names
            and not any(call.covers(linear) for linear in self.linears)
        ]
        outer = [c for c in between if not any(o is not c and o.covers(c) for o in between)]
        names = [call.name for call in outer]
        if len(names) == 2 and names[0].rpartition(".")[2].lower().startswith("k"):
            names.reverse()
        return (names[0], names[1]) if len(names) == 2 else (None, None)

    def biases(self, call: Call) -> tuple[str | None, str | None, str | None] | None:
        """The parameters that a block adds to q, k and v itself."""
        if not call.functional or call.bias is None or call.bias is getattr(call.module, "bias", 0):
            return None
        parts = call.bias.chunk(3)
        owner = call.name.rpartition(".")[0]
        holder = self.block.get_submodule(owner)
        held = {**holder._parameters, **holder._buffers}
        known = {f"{owner}.{k}".lstrip("."): v for k, v in held.items() if v is not None}
        found = []
        for part in parts:
            equal = (n for n, v in known.items() if v.shape == part.shape and torch.equal(v, part))
            name = next(equal, None)
            if name is None and part.any():
                raise Mismatch("the bias of its q, k and v is not a parameter of its attention")
            found.append(name)
        return found[0], found[1], found[2]

    def frame(self, qkv: list[Call], project: _Half) -> Recipe:
        """The recipe but for the number of heads and what depends on it."""
        x = self.tape.tokens
        norm1 = self.maker(qkv[0].given)
        if norm1 is not None and not same(norm1.given, x):
            raise Mismatch("its attention does not start from a norm of its tokens")
        if norm1 is None and not same(qkv[0].given, x):
            raise Mismatch("something is computed between its tokens and its attention")
        rest = [call for call in self.linears if call.start > project.end]
        if not rest:
            raise Mismatch("it has no MLP after its attention")
        for mlp in self.mlps(rest, project):
            found = self._joined(norm1, project, mlp)
            if found is not None:
                form, before, after, scales = found
                return Recipe(
                    dim=self.dim,
                    heads=0,
                    head_dim=0,
                    scale=1.0,
                    form=form,
                    norm1=before,
                    qkv=(),
                    packing="part",
                    biases=self.biases(qkv[0]),
                    project=tuple(str(name) for name in project.names),
                    norm2=after,
                    mlp=mlp.names,
                    project_scale=scales[0],
                    mlp_scale=scales[1],
                    spatial=x.dim() == 4,
                    returns=returned_length(self.tape.returned),
                )
        raise Mismatch(
            "its residual sums are not tokens + attention and then + MLP, with or without norms"
        )

    def _joined(
        self, norm1: Call | None, project: _Half, mlp: _Half
    ) -> tuple[Form, str | None, str | None, tuple[str | None, str | None]] | None:
        """How the halves are joined: form, norms and layer scales; None if not as known."""
        x, out = self.tape.tokens, self.tape.output
        norm2 = self.maker(mlp.given)
        entry = mlp.given if norm2 is None else norm2.given
        first = None if norm1 is None else norm1.name
        second = None if norm2 is None else norm2.name
        if same(entry, x) or (norm1 is not None and same(mlp.given, norm1.result)):
            factors = self._factors()
            for one, two in product(factors, factors):
                if _close(out, x, self._times(project, one), self._times(mlp, two)):
                    return "parallel", first, second, (one, two)
            return None
        before = self._factor(entry, x, project)
        if before is False:
            return None
        after = self._factor(out, entry, mlp)
        if after is not False:
            return "pre", first, second, (before, after)
        last = self.maker(out, mlp.end)
        if norm1 is not None or norm2 is None or last is None:
            return None
        after = self._factor(last.given, norm2.result, mlp)
        return None if after is False else ("post", second, last.name, (before, after))

    def _factors(self) -> list[str | None]:
        """No layer scale, or a parameter that may be one."""
        own = [
            name
            for name, parameter in self.block.named_parameters()
            if parameter.numel() == self.dim and "." not in name
        ]
        return [None, *own]

    def _times(self, half: _Half, factor: str | None) -> Tensor:
        if factor is None:
            return half.result
        return half.result * value(self.block, factor).flatten()

    def _factor(self, total: Tensor | None, start: Tensor | None, half: _Half) -> Factor:
        """The layer scale s with total = start + s * half; False if there is none."""
        if total is None or start is None:
            return False
        for factor in self._factors():
            if _close(total, start, self._times(half, factor)):
                return factor
        return False

    def mlps(self, rest: list[Call], project: _Half) -> Iterator[_Half]:
        """What may be the MLP: one part around all the remaining layers, or parts in a row."""
        for call in self.calls:
            after = call.start > project.end and call.alone
            whole = after and all(call.covers(linear) for linear in rest)
            if whole and call.given is not None and call.result is not None:
                yield self._extended((call.name,), call)
        row = self._row(rest)
        if row is not None:
            names, last = row
            half = self._extended(tuple(names), last)
            first = rest[0].given
            if first is not None:
                yield replace(half, given=first)

    def _row(self, rest: list[Call]) -> tuple[list[str | Gated], Call] | None:
        """The remaining layers one after another, with activations between them."""
        names: list[str | Gated] = []
        tensor, left, last = rest[0].given, rest, rest[0]
        while left:
            if not same(left[0].given, tensor):
                act = _activation(tensor, left[0].given)
                if act is None:
                    return None
                names, tensor = [*names, act], left[0].given
            if len(left) > 2 and same(left[1].given, tensor):
                gated = _gating(left)
                if gated is None:
                    return None
                names, tensor, left = [*names, gated], left[2].given, left[2:]
                continue
            last = self._widest(left, tensor)
            names, tensor = [*names, last.name], last.result
            left = [call for call in left if not last.covers(call)]
        return names, last

    def _widest(self, left: list[Call], tensor: Tensor | None) -> Call:
        """The outermost part that starts with the first of the remaining layers."""
        for call in self.calls:
            starts = call.alone and same(call.given, tensor) and call.covers(left[0])
            if starts and call.end <= self._bound(left):
                return call
        return left[0]

    def _bound(self, left: list[Call]) -> int:
        return left[1].start if len(left) > 1 else left[0].end + 10**9


def returned_length(result: Any) -> int | None:
    """The length of the tuple that a block returned; None for a tensor."""
    if isinstance(result, Tensor):
        return None
    others = result[1:] if isinstance(result, tuple) and isinstance(result[0], Tensor) else [0]
    if any(entry is not None for entry in others):
        raise Mismatch("it returns more than its tokens")
    return len(result)


def _close(total: Tensor, *parts: Tensor) -> bool:
    try:
        expected = sum(part.reshape(total.shape) for part in parts)
    except RuntimeError:
        return False
    return bool((total - expected).abs().max() <= _CLOSE * total.abs().max())


def _activation(given: Tensor | None, result: Tensor | None) -> str | None:
    if given is None or result is None or given.shape != result.shape:
        return None
    known = (name for name, f in ACTIVATIONS.items() if _close(result, f(given)))
    return next(known, None)


def _gating(left: list[Call]) -> Gated | None:
    """The activation of a gated MLP whose gate and up layers are the first two of `left`."""
    target = left[2].given
    for gate, up in (left[:2], left[1::-1]):
        if target is None or gate.result is None or up.result is None:
            return None
        if not gate.result.shape == up.result.shape == target.shape:
            return None
        for name, act in ACTIVATIONS.items():
            if _close(target, act(gate.result) * up.result):
                return Gated(gate.name, up.name, name)
    return None
