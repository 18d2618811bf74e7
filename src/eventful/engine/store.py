"""Memory and recordings on a device, shared by a model's streams with frames of one kind."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from eventful.engine.call import Call
from eventful.engine.probe import Probe
from eventful.engine.request import HostBuffers, Outcome, StepRequest, StepShape
from eventful.engine.shaped import ShapedStep
from eventful.engine.view import ModelView
from eventful.memory.slots import SlotPool

MOST_SHAPES = 32  # shapes of step whose recordings are kept
_MOST_KINDS = 4  # kinds of frame whose memory and recordings are kept without a stream
_MANY = 4  # streams for which a recording is tied to their slots


class DeviceStore:
    """The slots and the recorded steps of one model, for frames of one shape, dtype and device.

    Attributes:
        pool: the slots.
        lock: one step at a time: threads share the fixed places.
    """

    def __init__(self) -> None:
        self.pool = SlotPool()
        self.lock = threading.Lock()
        self.constants: dict[Any, Any] = {}
        self.shapes: OrderedDict[StepShape, ShapedStep] = OrderedDict()
        self._last: tuple[StepShape, ShapedStep] | None = None  # used last
        self._generation = 0
        self._seen: list[ModelView] = []  # of streams whose weights are those in use
        self._probe = Probe([])  # of these weights, and what it read of them
        self._contents: list[Tensor] = []
        self._graph_memory: Any = None
        self._last_stream: Any = None

    @property
    def idle(self) -> bool:
        """Whether no stream has its memory here."""
        return self.pool.used == 0

    def use_weights(self, view: ModelView) -> None:
        """Forget what was made for other weights."""
        if self._seen and (view is self._seen[0] or any(view is seen for seen in self._seen)):
            return
        view.note_contents()
        if not self._seen or not view.agrees(self._seen[0]):
            self._seen.clear()
            self.constants.clear()
            self._drop_shapes()
            self._probe = Probe(view.parameters)
            self._contents = self._probe.values()
        self._seen = [view, *self._seen[:63]]

    def run(self, request: StepRequest, host: HostBuffers) -> Outcome:
        """Run one pass; its caller holds `lock`."""
        stream = self._follow_stream(request.call.frame.device)
        if self.pool.generation != self._generation:
            self._drop_shapes()
            self._generation = self.pool.generation
        # Stock attention is faster for many streams, but knows no slots: a shape of its own.
        state = request.state
        state.fixed = len(state) >= _MANY and state.in_a_row
        shape = request.shape()
        if self._last is None or self._last[0] != shape:
            self._last = (shape, self._shaped(shape, request.call))
        shaped = self._last[1]
        try:
            return shaped.run(request, host, stream, self._memory_of_graphs)
        finally:
            state.slots = state.good = None  # memory of a recording, which others write over

    def close(self) -> None:
        """Give up the memory of the slots and all recordings."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # recorded work may still be running
        self._drop_shapes()
        self._seen.clear()
        self._probe, self._contents = Probe([]), []
        self.constants.clear()
        self.pool.close()

    def _shaped(self, shape: StepShape, call: Call) -> ShapedStep:
        """The step of one shape; the one not used for longest makes room."""
        if shape not in self.shapes:
            if len(self.shapes) >= MOST_SHAPES:
                if call.frame.is_cuda:
                    torch.cuda.synchronize(call.frame.device)  # it may still be running
                self.shapes.popitem(last=False)
            self.shapes[shape] = ShapedStep.make(call, self.constants, self._probe_weights)
        self.shapes.move_to_end(shape)
        return self.shapes[shape]

    def _drop_shapes(self) -> None:
        self.shapes.clear()
        self._last = None
        self._graph_memory = None

    def _memory_of_graphs(self) -> Any:
        """The pool of the graphs' memory, which ends with the last of its graphs."""
        if self._graph_memory is None or all(
            shaped.recorded is None for shaped in self.shapes.values()
        ):
            self._graph_memory = torch.cuda.graph_pool_handle()
        return self._graph_memory

    def _probe_weights(self, report: Tensor) -> None:
        """Report whether weights were written to past torch's version counters."""
        found = self._probe.difference(self._contents)
        if found:
            report[:, 4] = torch.stack(found).any()

    def _follow_stream(self, device: torch.device) -> Any:
        """The current CUDA stream; steps queued on different ones come one after another."""
        stream = current_stream(device)
        if self._last_stream is not None and stream is not self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
        return stream


def store_of(stores: dict[Any, DeviceStore], kind: Any) -> DeviceStore:
    """The store for frames of one kind, made on first use.

    Of the kinds without a stream those not used for longest are given up.
    """
    found = stores.pop(kind, None) or DeviceStore()
    stores[kind] = found  # the last is the one used last
    idle = [known for known, store in stores.items() if store.idle and known != kind]
    for known in idle[: max(0, len(idle) + 1 - _MOST_KINDS)]:
        stores.pop(known).close()
    return found


_streams: dict[Any, Any] = {}  # by the numbers torch knows them by


def current_stream(device: torch.device) -> Any:
    """The current CUDA stream; None on other devices.

    `torch.cuda.current_stream` makes a new object at every call, which takes as long as several
    launches.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    numbers = torch._C._cuda_getCurrentStream(index)
    if numbers not in _streams:
        _streams[numbers] = torch.cuda.current_stream(device)
    return _streams[numbers]
