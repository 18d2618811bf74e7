"""Work that is launched again as a whole: two CUDA graphs, of a whole call or of its blocks.

Some heads ask the host how many objects there are, and such a call cannot be recorded whole.
Then only what lies between the first block's entry and the last one's exit is: on replay the
model's own code runs around the blocks, which return what the recording left.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from eventful.rules.spec import BlockSpec
from eventful.rules.step import Arguments, RunBlock, Step
from eventful.tokens.selection import Selection


class Graphs:
    """Two CUDA graphs, recorded one after the other on a stream aside.

    Attributes:
        complete: both are there.
    """

    def __init__(self, device: torch.device, pool: Any, side: Any) -> None:
        self._device, self._pool, self._side = device, pool, side
        self._graphs: list[Any] = []
        self.complete = False
        self._open: Any = None
        self._aside = contextlib.ExitStack()

    def begin(self) -> None:
        """Record what follows as the first graph."""
        torch.cuda.synchronize(self._device)
        self._aside.enter_context(torch.cuda.stream(self._side))
        self._start()

    def switch(self) -> None:
        """Record what follows as the second graph."""
        self._stop()
        self._start()

    def end(self) -> None:
        """Both graphs are there."""
        self._stop()
        self._aside.close()
        self.complete = True

    def abandon(self) -> None:
        """Leave a recording that failed, on the stream it began on."""
        if self._open is not None:
            with contextlib.suppress(Exception):
                self._stop()
        self._aside.close()
        torch.cuda.synchronize(self._device)

    def play(self, between: Callable[[], None]) -> None:
        """Launch both; `between` runs ahead of the second."""
        first, second = self._graphs
        first.replay()
        between()
        second.replay()

    def _start(self) -> None:
        graph: Any = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph

    def _stop(self) -> None:
        graph, self._open = self._open, None
        graph.capture_end()


_sides: dict[torch.device, Any] = {}  # of all recordings: libraries keep memory for each stream
_recording = threading.Lock()


@contextlib.contextmanager
def recording(device: torch.device) -> Iterator[Any]:
    """The CUDA stream to record on; one recording at a time."""
    with _recording:
        if device not in _sides:
            _sides[device] = torch.cuda.Stream(device)
        yield _sides[device]


_watch = threading.Lock()  # what `find_waits` turns on belongs to the whole process


@contextlib.contextmanager
def find_waits(on: bool) -> Iterator[list[str]]:
    """Collects where the host waited for the device, if `on`; such work cannot be recorded.

    Other threads' waits are taken for this one's, which costs no more than a smaller recording.
    """
    found: list[str] = []
    if not on:
        yield found
        return
    others: list[warnings.WarningMessage] = []
    try:
        with _watch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
                for made in caught:
                    text = str(made.message)
                    if "synchronizing CUDA operation" in text:
                        found.append(f"{made.filename}:{made.lineno}")
                    elif "Synchronization debug mode" not in text:  # what it says of itself
                        others.append(made)
    finally:
        for made in others:
            warnings.warn_explicit(made.message, made.category, made.filename, made.lineno)


@contextlib.contextmanager
def uncached_casts() -> Iterator[None]:
    """Autocast keeps cast weights until its region ends; recorded work must not read those."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class Recording(BaseException):
    """Ends a forward call whose blocks are recorded: nothing was computed that could go on."""


class DifferentCall(BaseException):
    """Ends a forward call whose first block is called in another way than the recorded one."""


@dataclass(frozen=True)
class _Left:
    """What a block left behind: its output, and the state of the step for code between blocks."""

    output: Any
    compact: dict[str, Tensor]
    selections: dict[str, Selection]


@dataclass
class Blocks:
    """Recorded blocks.

    Attributes:
        places: the arguments of the first block; its tensors are where a replay reads them.
        left: by block.
        held: arguments that the recorded work may read, kept alive.
    """

    places: list[Any] = field(default_factory=list)
    left: dict[str, _Left] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)


class Recorder:
    """Records the blocks of one step.

    Args:
        begin: starts recording.
        finish: ends it.
    """

    def __init__(self, begin: Callable[[], None], finish: Callable[[], None]) -> None:
        self.blocks = Blocks()
        self._begin, self._finish = begin, finish
        self._moved: dict[int, Tensor] = {}

    def block(self, step: Step, spec: BlockSpec, call: Arguments, run: RunBlock) -> Any:
        """Record one block; at the last one raises `Recording`."""
        given, tree = pytree.tree_flatten(call)
        self.blocks.held += given
        if spec.first:
            places = [v.clone() if isinstance(v, Tensor) else v for v in given]
            pairs = zip(given, places, strict=True)
            self._moved = {id(v): place for v, place in pairs if isinstance(v, Tensor)}
            self.blocks.places = places
            self._begin()
        args, kwargs = pytree.tree_unflatten([self._moved.get(id(v), v) for v in given], tree)
        output = run(args, kwargs)
        left = _Left(output, dict(step.compact), dict(step.selections))
        self.blocks.left[spec.name] = left
        if spec.last:
            self._finish()
            raise Recording
        return output


class Replay:
    """Plays recorded blocks in one step.

    Args:
        play: runs the recorded work.
    """

    def __init__(self, blocks: Blocks, play: Callable[[], None]) -> None:
        self._blocks, self._play = blocks, play
        self._outputs: dict[str, Any] = {}

    def block(self, step: Step, spec: BlockSpec, call: Arguments, run: RunBlock) -> Any:
        """What the block returned, in memory of its own; at the first one everything runs."""
        if spec.first:
            self._fill(pytree.tree_leaves(call))
            self._play()
            names = list(self._blocks.left)
            outputs = _copied([self._blocks.left[name].output for name in names])
            self._outputs = dict(zip(names, outputs, strict=True))
        left = self._blocks.left[spec.name]
        step.compact.clear()
        step.compact.update(left.compact)
        step.selections.update(left.selections)
        return self._outputs[spec.name]

    def _fill(self, given: list[Any]) -> None:
        places = self._blocks.places
        if [_form(value) for value in given] != [_form(place) for place in places]:
            raise DifferentCall
        for place, value in zip(places, given, strict=True):
            if isinstance(place, Tensor):
                place.copy_(value, non_blocking=True)


def _form(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


def _copied(values: Sequence[Any]) -> list[Any]:
    """The same structures with copies of their tensors, all copied at once."""
    given, tree = pytree.tree_flatten(list(values))
    tensors = {id(v): v for v in given if isinstance(v, Tensor)}
    copies = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        keys = [key for key, tensor in tensors.items() if tensor.dtype == dtype]
        torch._foreach_copy_([copies[key] for key in keys], [tensors[key] for key in keys])
    made: list[Any] = pytree.tree_unflatten([copies.get(id(v), v) for v in given], tree)
    return made
