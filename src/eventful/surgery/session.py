"""What a converted model carries: its rule, its trunks, and the step that is running."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from eventful.config import Config
from eventful.cost.times import Costs
from eventful.rules.step import Step
from eventful.surgery.adapter import Adapter
from eventful.surgery.original import Original

if TYPE_CHECKING:  # the engine is above this package and is not imported from here
    from eventful.engine.store import DeviceStore

Part = nn.Module | Tensor | None
KeptTensor = tuple[ref[Tensor], int, int]  # a tensor, its address and its count of writes


@dataclass
class Session:
    """Ties the blocks of one converted model to the step that is running, per thread.

    Attributes:
        config: the update rule the model was converted with.
        trunks: the converted trunks, each with its adapter, by name in the model.
        blocks: names of the converted blocks, by trunk name.
        sequence: every block of a trunk in order, converted or not, by trunk name.
        heads: modules outside the trunks that keep maps for each stream, by name in the model.
        loads: state dicts loaded into the trunks and these heads since conversion.
        original: the model that was cloned; None if it was converted in place.
        volatile: attributes, by module, that the model's own forward changes.
        settings: attributes of the trunks when a stream last started.
        buffers: and other tensors of the trunks that are not parameters, at that time.
        revision: how many times a starting stream found changed settings or buffers.
        placed: instance attributes set on modules, with what they replaced, for `restore`.
        handles: hooks to be removed with them.
        stores: memory and CUDA graphs of steps on a GPU, by frame shape, dtype and device.
        costs: measured times of steps, by model, rule, machine and frame, see `cost.times`.
        parts: modules and parameters of the trunks when they were last compared.
        structure: a number that grows each time the comparison finds other parts.
        said: warnings that were given.
    """

    config: Config
    trunks: dict[str, tuple[nn.Module, Adapter]] = field(default_factory=dict)
    blocks: dict[str, list[str]] = field(default_factory=dict)
    sequence: dict[str, list[nn.Module]] = field(default_factory=dict, repr=False)
    heads: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    loads: int = 0
    original: Original | None = field(default=None, repr=False)
    volatile: WeakKeyDictionary[nn.Module, set[str]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    settings: list[object] | None = field(default=None, repr=False)
    buffers: list[KeptTensor] = field(default_factory=list, repr=False)
    revision: int = 0
    placed: list[tuple[nn.Module, str, dict[str, object]]] = field(default_factory=list, repr=False)
    handles: list[RemovableHandle] = field(default_factory=list, repr=False)
    stores: dict[Hashable, DeviceStore] = field(default_factory=dict, repr=False)
    costs: dict[str, Costs] = field(default_factory=dict, repr=False)
    parts: list[ref[nn.Module | Tensor] | None] = field(default_factory=list, repr=False)
    structure: int = 0
    said: set[str] = field(default_factory=set, repr=False)
    _running: threading.local = field(default_factory=threading.local, repr=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def structure_of(self, parts: Sequence[Part]) -> int:
        """A number for these modules and parameters; it changes when one of them is replaced."""
        with self._counting:
            known = [None if get is None else get() for get in self.parts]
            if len(parts) != len(known) or any(map(operator.is_not, parts, known)):
                # Weak references, or weights that were replaced would stay in memory.
                self.parts = [None if part is None else ref(part) for part in parts]
                self.structure += 1
            return self.structure

    def warn_once(self, text: str) -> None:
        """Warn, the first time for this model."""
        if text not in self.said:
            self.said.add(text)
            warnings.warn(text, stacklevel=2)

    @property
    def step(self) -> Step | None:
        """The step running in this thread."""
        step: Step | None = getattr(self._running, "step", None)
        return step

    @step.setter
    def step(self, step: Step | None) -> None:
        self._running.step = step

    def place(self, module: nn.Module, attribute: str, value: object) -> None:
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
            "buffers": [],
            "stores": {},
            "costs": {},
            "parts": [],
            "said": set(),
        }
        return {**self.__dict__, **left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.volatile = WeakKeyDictionary()
        self._running = threading.local()
        self._counting = threading.Lock()


def count_loads(module: nn.Module, session: Session) -> RemovableHandle:
    """Count in the session the state dicts loaded into `module`; returns the hook's handle."""
    return module.register_load_state_dict_post_hook(_LoadCounter(session))


class _LoadCounter:
    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        self.session.loads += 1
