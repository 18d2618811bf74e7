"""What an adapter tells the rest of the library about one family of models."""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from eventful.config import Config
from eventful.errors import UnsupportedError
from eventful.layout import TokenLayout
from eventful.spec import BlockSpec
from eventful.step import Step


class Mismatch(Exception):
    """A block that cannot be made eventful; the message says why."""


@dataclass
class Session:
    """Ties the blocks of one converted model to the step that is running, per thread.

    Attributes:
        config: the update rule the model was converted with.
        trunks: the converted trunks: name in the model, trunk module, adapter.
        blocks: names of the converted blocks, by trunk name.
        sequence: every block of a trunk in order, converted or not, by trunk name.
        loads: state dicts loaded into the trunks since conversion.
        original: the tree that the model was cloned from; None if it was converted in place.
        volatile: attributes, by module, that the model's own forward changes.
        settings: attributes of the trunks as a stream last found them when it started.
        revision: how often a stream found other settings than the one before.
        placed: instance attributes set on modules, with what they replaced, for `restore`.
        handles: hooks to be removed with them.
        residences: where steps on a device keep memory and recorded work, by kind of frame.
        costs: what steps were seen to cost, by kind of step.
        parts: modules and parameters of the trunks, as the last census saw them.
        structure: grows whenever a census sees other parts than the one before.
    """

    config: Config
    trunks: dict[str, tuple[nn.Module, Adapter]] = field(default_factory=dict)
    blocks: dict[str, list[str]] = field(default_factory=dict)
    sequence: dict[str, list[nn.Module]] = field(default_factory=dict, repr=False)
    loads: int = 0
    original: Any = field(default=None, repr=False)
    volatile: WeakKeyDictionary[nn.Module, set[str]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    settings: list[Any] | None = field(default=None, repr=False)
    revision: int = 0
    placed: list[tuple[nn.Module, str, dict[str, Any]]] = field(default_factory=list, repr=False)
    handles: list[Any] = field(default_factory=list, repr=False)
    residences: dict[Any, Any] = field(default_factory=dict, repr=False)
    costs: dict[str, Any] = field(default_factory=dict, repr=False)
    parts: list[Any] = field(default_factory=list, repr=False)
    structure: int = 0
    _running: Any = field(default_factory=threading.local, repr=False)
    _counting: Any = field(default_factory=threading.Lock, repr=False)

    def structure_of(self, parts: list[Any]) -> int:
        """A number for these modules and parameters; others never have the same."""
        with self._counting:
            known = [None if get is None else get() for get in self.parts]
            if len(parts) != len(known) or any(map(operator.is_not, parts, known)):
                # Weakly, or weights that were replaced would stay in memory.
                self.parts = [None if part is None else ref(part) for part in parts]
                self.structure += 1
            return self.structure

    @property
    def step(self) -> Step | None:
        """The step running in this thread."""
        step: Step | None = getattr(self._running, "step", None)
        return step

    @step.setter
    def step(self, step: Step | None) -> None:
        self._running.step = step

    def place(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Set an instance attribute that shadows the class's until `restore`."""
        before = {attribute: vars(module)[attribute]} if attribute in vars(module) else {}
        vars(module)[attribute] = value
        self.placed.append((module, attribute, before))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles of a model start outside any step, with weights of their own."""
        left_out: dict[str, Any] = {
            "_running": None,
            "_counting": None,
            "original": None,
            "volatile": None,
            "settings": None,
            "residences": {},
            "costs": {},
            "parts": [],
        }
        return {**self.__dict__, **left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.volatile = WeakKeyDictionary()
        self._running = threading.local()
        self._counting = threading.Lock()


@dataclass
class BlockCall:
    """The arguments of one call of a block, as the update rules need them."""

    tokens: Tensor  # (B, N, D), or (B, M, D) between blocks of gating `frame`
    positions: Any = None


class Adapter(ABC):
    """One family of models: how to find its blocks, and how to read and feed them.

    A trunk is the module that owns the list of blocks. Subclass this, then
    `eventful.register_adapter(YourAdapter())`.
    """

    name: ClassVar[str]
    library: ClassVar[str] = ""  # package the family comes from; empty for one's own
    adds_positions: bool = True  # a position encoding is added to the tokens

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether `module` is a trunk of this family."""

    @abstractmethod
    def blocks(self, trunk: nn.Module) -> Sequence[tuple[str, nn.Module]]:
        """The blocks in order, each with its name relative to the trunk."""

    @abstractmethod
    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """The block as the update rules see it; raises `Mismatch` with the reason if it is none."""

    @abstractmethod
    def layout(self, trunk: nn.Module, size: tuple[int, int]) -> TokenLayout:
        """The token layout for frames of `size` (height, width) pixels."""

    def default_size(self, trunk: nn.Module) -> tuple[int, int]:
        """Frame size the model was made for, for a dry run without frames."""
        raise UnsupportedError(f"{self.name} models do not tell their frame size; pass `size`.")

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """Tokens and positions from a block's arguments; by default the first one is the tokens."""
        for key in ("attn_mask", "attention_mask", "mask", "is_causal"):
            refuse(kwargs.get(key), key)
        return BlockCall(args[0] if args else kwargs["hidden_states"])

    def write(self, tokens: Tensor, layout: TokenLayout | None, args: tuple[Any, ...]) -> Any:
        """A block's return value; `layout` is None between blocks of gating `frame`."""
        return tokens

    def watched(self, spec: BlockSpec, step: Step) -> bool:
        """Whether anyone but the next block sees this block's output; by default, its hooks do."""
        return bool(spec.module._forward_hooks)

    def knows_loop(self, trunk: nn.Module) -> bool:
        """Whether the loop over the blocks is the library's own, which keeps outputs to itself.

        In a subclass that runs its own loop every block returns all its tokens.
        """
        names = ("forward", "forward_features")
        # One on the object itself stands ahead of the class's; eventful's own calls the class's.
        loops = [vars(trunk).get(name, getattr(type(trunk), name, None)) for name in names]
        return not self.library or all(
            loop is None or loop.__module__.split(".")[0] in (self.library, "eventful")
            for loop in loops
        )

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Any]:
        """Further instance attributes to set, e.g. a wrapped method, by name relative to the trunk.

        A dotted name such as "encoder.forward" is an attribute of a submodule.
        """
        return {}


def refuse(value: Any, name: str) -> None:
    """Raise for an argument that eventful attention cannot honour."""
    if value is not None and value is not False:
        raise UnsupportedError(
            f"{name} was passed to a block inside a stream. Eventful attention has no masks; call "
            "the model outside the stream for this input."
        )


def is_class(module: nn.Module, path: str, *names: str) -> bool:
    """Whether `module` is of a class from `path`, without importing the library it is from."""
    return any(c.__module__ == path and c.__name__ in names for c in type(module).__mro__)


def per_head(norm: nn.Module, tokens: Tensor, heads: int) -> Tensor:
    """Apply a norm over the channels of each head of (B, M, H*d)."""
    if isinstance(norm, nn.Identity):
        return tokens
    return norm(tokens.unflatten(-1, (heads, -1))).flatten(-2)
