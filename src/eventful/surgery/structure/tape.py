"""What a block does with some tokens: the calls of its parts, its linear layers, its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from eventful.surgery.outputs import first_tensor

_SDPA = F.scaled_dot_product_attention
_SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)


@dataclass(eq=False)
class Call:
    """One call of a part of a block.

    Attributes:
        name: of the part, relative to the block.
        given: the first tensor it got.
        result: the first tensor it returned.
        start, end: when it began and ended, on one scale for all calls.
        bias: of a linear layer whose weight was used without calling the layer.
        functional: whether this is such a use.
        alone: whether it got one tensor.
    """

    name: str
    module: nn.Module
    given: Tensor | None
    start: int
    result: Tensor | None = None
    end: int = -1
    bias: Tensor | None = None
    functional: bool = False
    alone: bool = True

    def covers(self, other: Call) -> bool:
        """Whether the other call happened inside this one."""
        return self.start <= other.start and other.end <= self.end

    @property
    def is_linear(self) -> bool:
        """Whether the part is a linear layer, or stands for one as those of PEFT do."""
        return is_linear(self.module)


@dataclass
class Tape:
    """A recorded run of a block.

    Attributes:
        tokens: what the block got.
        output: the first tensor it returned.
        returned: what it returned.
        calls: of its parts, in the order in which they began.
        heads: numbers of attention heads that were seen.
        scales: factors that were passed to torch's attention.
        masked: whether a mask or a bias was added inside torch's attention.
        causal: whether attention was causal.
    """

    tokens: Tensor
    output: Tensor
    returned: Any = None
    calls: list[Call] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    masked: bool = False
    causal: bool = False


def record(block: nn.Module, run: Callable[[], Any], tokens: Tensor) -> Tape:
    """Run a block and note what its parts do.

    Args:
        run: calls the block on `tokens`.
    """
    tape = Tape(tokens, tokens)
    recorder = _Recorder(block, tape, tokens.flatten(1, -2).shape[1])
    with recorder.hooked(), recorder, torch.no_grad():
        tape.returned = run()
    found = first_tensor(tape.returned)
    if found is None:
        raise TypeError("it returned no tensor")
    tape.output = found
    return tape


class _Recorder(TorchFunctionMode):
    """Notes the calls of parts by hooks, and of functions by torch's own means."""

    def __init__(self, block: nn.Module, tape: Tape, count: int) -> None:
        super().__init__()
        self.block, self.tape, self.count = block, tape, count
        self.clock = 0
        self.open: list[Call] = []
        self.owners = {
            id(module.weight): (name, module)
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
        }

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks on every part, removed afterwards."""
        handles = []
        for name, module in self.block.named_modules():
            if name:
                before, after = self._before(name), self._after
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _before(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = (*args, *kwargs.values())
            call = Call(name, module, first_tensor(values), self._tick())
            call.alone = sum(isinstance(value, Tensor) for value in values) == 1
            self.tape.calls.append(call)
            self.open.append(call)

        return note

    def _after(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        call = self.open.pop()
        call.result, call.end = first_tensor(result), self._tick()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.linear:
            self._note_linear(args, kwargs, result)
        elif func is _SDPA:
            self._note_attention(args, kwargs)
        elif func in _SOFTMAX and result.dim() >= 3 and result.shape[-1] == self.count:
            self.tape.heads.append(result.shape[-3] if result.dim() > 3 else 1)
        return result

    def _note_linear(self, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> None:
        values = [*args, *(kwargs[k] for k in ("input", "weight", "bias") if k in kwargs)]
        owner = self.owners.get(id(values[1]))
        inside = self.open[-1].module if self.open else None
        if owner is None or inside is owner[1] or isinstance(inside, nn.MultiheadAttention):
            return
        bias = values[2] if len(values) > 2 else None
        now = self._tick()
        call = Call(*owner, values[0], now, result, self._tick(), bias, functional=True)
        self.tape.calls.append(call)

    def _note_attention(self, args: tuple[Any, ...], kwargs: Any) -> None:
        if args:
            self.tape.heads.append(args[0].shape[-3])
        scale = kwargs.get("scale")
        if scale is not None:
            self.tape.scales.append(float(scale))
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        self.tape.masked |= mask is not None
        self.tape.causal |= bool(kwargs.get("is_causal"))


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, or stands for one as those of PEFT do."""
    if isinstance(module, nn.Linear):
        return True
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    return all(isinstance(size, int) for size in sizes) and not _has_activation(module)


def _has_activation(module: nn.Module) -> bool:
    # An MLP may have `in_features`, too; what stands for a linear layer holds one or wraps one.
    linears = [m for m in module.modules() if isinstance(m, nn.Linear) and m is not module]
    return bool(linears) and not hasattr(module, "base_layer")


def same(one: Tensor | None, two: Tensor | None) -> bool:
    """Whether two tensors are one, or views of all of one."""
    if one is None or two is None:
        return False
    if one is two:
        return True
    return (
        one.data_ptr() == two.data_ptr()
        and one.numel() == two.numel()
        and one.is_contiguous() == two.is_contiguous()
        and one.shape[-1] == two.shape[-1]
    )
