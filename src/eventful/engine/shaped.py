"""One shape of step on a device: its fixed memory, and its recording once there is one.

A step of B streams with M slots to each selection always launches the same kernels on the
same addresses: the frame, the streams' parameters and the numbers of their slots are copied to
fixed places first. On CUDA it is recorded on its second use as two graphs, one up to the choice
of tokens and one for the rest, so that the host learns what was chosen while the blocks still
run. Of a model that waits for the host itself, as some detectors do, the blocks alone are recorded.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from eventful import ops
from eventful.engine.call import Call
from eventful.engine.graphs import (
    Blocks,
    DifferentCall,
    Graphs,
    Recorder,
    Recording,
    Replay,
    find_waits,
    recording,
    uncached_casts,
)
from eventful.engine.launch import NotReached, launch
from eventful.engine.request import PARAMS, HostBuffers, Outcome, StepRequest
from eventful.errors import UnsupportedError
from eventful.rules.record import HeadWork, StepRecord, counts_in, record_of
from eventful.rules.step import GateInputs, Step


@dataclass
class Recorded:
    """A recorded step.

    Attributes:
        blocks: where the blocks alone are recorded; None where the whole call is.
        output: of the model, written by each replay.
        record: of the step that was recorded.
        counts: its tensors of counts.
        numbers: (len(counts), B) what they hold after a replay.
    """

    graphs: Graphs
    blocks: Blocks | None
    output: Any
    record: StepRecord
    counts: list[Tensor]
    numbers: Tensor


@dataclass
class ShapedStep:
    """The fixed places of one shape of step, and its recording once there is one.

    Attributes:
        params: see `HostBuffers`.
        report_extra: adds to the report on the device what gates do not know.
        waits: the rest of the model waits for the host, so it cannot be recorded; None until
            known.
    """

    frame: Tensor
    hint: Tensor | None
    params: Tensor
    report: Tensor
    sound: Tensor
    constants: dict[Any, Any]
    report_extra: Callable[[Tensor], None]
    uses: int = 0
    refused: bool = False
    waits: bool | None = None
    recorded: Recorded | None = None
    _current: Any = field(default=None, repr=False)  # the CUDA stream of the running step
    _held: Any = field(default=None, repr=False)  # rows, turns and parameters in `params`

    @classmethod
    def make(
        cls, call: Call, constants: dict[Any, Any], report_extra: Callable[[Tensor], None]
    ) -> ShapedStep:
        """Fixed places for calls like `call` on frames of B streams."""
        frame = call.frame
        batch, device = len(frame), frame.device
        return cls(
            frame=torch.empty_like(frame, memory_format=torch.contiguous_format),
            hint=None if call.motion is None else torch.empty_like(call.motion).contiguous(),
            params=torch.zeros(PARAMS, batch, dtype=torch.float64, device=device),
            report=torch.zeros(batch, ops.REPORT, dtype=torch.int32, device=device),
            sound=torch.zeros(batch, dtype=torch.bool, device=device),
            constants=constants,
            report_extra=report_extra,
        )

    def run(self, request: StepRequest, host: HostBuffers, stream: Any, memory: Any) -> Outcome:
        """Run one pass.

        Args:
            stream: the current CUDA stream; None elsewhere.
            memory: makes the pool of the graphs' memory.
        """
        self._current = stream
        self.uses += 1
        if self.hint is not None and request.call.motion is not None:
            self.hint.copy_(request.call.motion, non_blocking=True)
        if not request.call.repeatable:
            self.waits = True
        held = self._set_params(request, host)
        outcome = self._run(request, host, memory)
        self._held = held
        return outcome

    def _run(self, request: StepRequest, host: HostBuffers, memory: Any) -> Outcome:
        """Replay the step, record it first, or launch its kernels anew."""
        stream = self._current
        recordable = stream is not None and request.capture and self.uses > 1 and not self.refused
        if recordable and self.recorded is None and self.waits is not None:
            self._record(request, memory())
        if recordable and self.recorded is not None:
            try:
                return self._replay(self.recorded, request, host)
            except DifferentCall:
                self.refused, self.recorded = True, None
        return self._run_directly(request, host)

    def _set_params(self, request: StepRequest, host: HostBuffers) -> tuple[Any, ...]:
        """Bring the parameters up to date; a steady stream's turns count on by themselves.

        Returns:
            Slots, turns and policies that the parameters stand for after the step.
        """
        state, params = request.state, request.resident.params
        held, self._held = self._held, None  # not known if the step fails
        now = ([*state.rows], [frames + 1 for frames in state.frames], params)
        if held is None or held[2] is not params or held != now:
            host.write(state, params)
            self.params.copy_(host.params, non_blocking=True)
        return now[0], [turn + 1 for turn in now[1]], params

    def _read_params(self, step: Step) -> None:
        """Have a step read its inputs from the fixed place; the turns there go on."""
        whole, real = self.params[:4].long(), self.params[4:].float()
        self.params[1] += 1
        (inputs,) = step.inputs.values()
        step.state.slots = whole[0]
        inputs.turn, inputs.cap, inputs.floor = whole[1:].unbind()
        inputs.level, inputs.low = real[:2].unbind()
        inputs.relative = None if inputs.relative is None else real[2]
        inputs.shared = None if inputs.shared is None else real[3]
        inputs.renewal = real[4]
        inputs.noise = None if inputs.noise is None else real[5:]

    def _step(self, request: StepRequest, gated: Callable[[], None]) -> Step:
        """A step whose inputs are still to be read."""
        plan, state = request.plan, request.state
        (trunk,) = plan.layouts
        state.good, unread = None, self.params[1]
        inputs = GateInputs(
            turn=unread,
            cap=unread,
            level=unread,
            low=unread,
            floor=unread,
            relative=unread if request.resident.needs[1] else None,
            shared=unread if request.resident.needs[2] else None,
            renewal=unread,
            noise=unread if request.resident.needs[0] else None,
            report=self.report,
            sound=self.sound,
            width=request.width,
            rows=request.rows,
            count_wanted=request.dense,
            gated=gated,
        )
        return Step(
            plan.config, state, plan.policies, [request.flush or request.dense] * len(state),
            plan.layouts, plan.maps, constants=self.constants, hint=self.hint,
            inputs={trunk: inputs},
            structure=request.structure,
        )  # fmt: skip

    def _run_directly(self, request: StepRequest, host: HostBuffers) -> Outcome:
        """Launch every kernel anew."""
        events: list[Any] = []

        def gated() -> None:
            self.report_extra(self.report)
            events.append(self._send_report(host))

        self.frame.copy_(request.call.frame, non_blocking=True)
        step = self._step(request, gated)
        self._read_params(step)
        cuda = self._current is not None
        with find_waits(cuda and self.waits is None) as found:
            output = launch(request.session, step, request.call.on(self.frame).run)
        if self.waits is None and (not found or self.uses > 1):  # at first it may be a compiler
            self.waits = bool(found)
        host.sound.copy_(self.sound, non_blocking=True)
        able = cuda and request.capture and not self.refused
        return Outcome(
            output, lambda: step.record, host.report, host.sound, events[0] if events else None,
            whole=None if able and self.waits is None else able and not self.waits,
        )  # fmt: skip

    def _send_report(self, host: HostBuffers) -> Any:
        """Start the report's way to the host; returns the event after which it is there."""
        host.report.copy_(self.report, non_blocking=True)
        if host.reported is not None:
            host.reported.record(self._current)
        return host.reported

    def _replay(self, recorded: Recorded, request: StepRequest, host: HostBuffers) -> Outcome:
        """Launch recorded work, inside a step of the model that runs around it if one does."""
        events: list[Any] = []

        def play() -> None:
            recorded.graphs.play(lambda: events.append(self._send_report(host)))
            host.sound.copy_(self.sound, non_blocking=True)

        heads: dict[str, dict[str, HeadWork]] | None = None
        if recorded.blocks is None:
            self.frame.copy_(request.call.frame, non_blocking=True)
            play()
            output = _cloned(recorded.output)
        else:
            output, heads = self._replay_blocks(recorded, recorded.blocks, request, play)
        record: Callable[[], StepRecord] = partial(
            record_of, recorded.record, recorded.counts, recorded.numbers.clone(), heads
        )
        if request.plan.maps:
            made = record()
            record = partial(_same, made)
        return Outcome(
            output, record, host.report, host.sound, events[0], True, recorded.blocks is None
        )

    def _replay_blocks(
        self, recorded: Recorded, blocks: Blocks, request: StepRequest, play: Callable[[], None]
    ) -> tuple[Any, dict[str, dict[str, HeadWork]]]:
        """The model's own code around blocks that are replayed: its output, and its heads' work."""
        step = self._step(request, lambda: None)

        def play_in_step() -> None:
            play()
            # Heads that run after the recorded blocks write to the same slots, as the blocks did.
            step.state.slots = self.params[0].long()
            step.state.accept(self.report[:, 1] > 0)
            step.record.gates, step.record.blocks = recorded.record.gates, recorded.record.blocks

        step.track = Replay(blocks, play_in_step)
        return launch(request.session, step, request.call.run), step.record.heads

    def _record(self, request: StepRequest, memory: Any) -> None:
        """Record a step that ran before as two graphs; on failure it stays as it is."""
        with recording(self.frame.device) as side:
            graphs = Graphs(self.frame.device, memory, side)
            try:
                with uncached_casts():
                    self.recorded = self._recorded(request, graphs)
            except BaseException as error:
                graphs.abandon()
                if not isinstance(error, Exception):
                    raise
                self._give_up(error.error if isinstance(error, NotReached) else error)

    def _recorded(self, request: StepRequest, graphs: Graphs) -> Recorded:
        """Record the whole call, or its blocks alone."""

        def gated() -> None:
            self.report_extra(self.report)
            graphs.switch()

        step_of: list[Step] = []
        numbers: list[Tensor] = []

        def finish() -> None:
            (step,) = step_of
            numbers.append(torch.stack([count.long() for count in counts_in(step.record)]))
            graphs.end()

        def whole() -> Any:
            output = request.call.on(self.frame).run()
            finish()
            return output

        blocks, output = None, None
        if self.waits:
            outer = self._step(request, gated)
            step_of.append(outer)
            outer.track = recorder = Recorder(partial(self._begin, graphs, outer), finish)
            with contextlib.suppress(Recording):
                launch(request.session, outer, request.call.run)
            blocks = recorder.blocks
        else:
            step_of.append(self._step(request, gated))
            self._begin(graphs, step_of[0])
            output = launch(request.session, step_of[0], whole)
        if not graphs.complete:
            raise UnsupportedError("The call ended ahead of the last block.")
        record = step_of[0].record
        return Recorded(graphs, blocks, output, record, counts_in(record), numbers[0])

    def _begin(self, graphs: Graphs, step: Step) -> None:
        """Start recording; the inputs are read inside the recording."""
        graphs.begin()
        self._read_params(step)

    def _give_up(self, error: Exception) -> None:
        """Go on with the blocks alone, or without a recording."""
        if not self.waits:
            self.waits = True  # the blocks alone, next time
            return
        self.refused = True
        warnings.warn(
            "This model's step cannot be recorded as a CUDA graph, so every frame launches "
            f"its kernels anew. {type(error).__name__}: {str(error)[:300]}",
            stacklevel=2,
        )


def _same(record: StepRecord) -> StepRecord:
    return record


def _cloned(output: Any) -> Any:
    """The same structure with copies of its tensors."""
    if isinstance(output, Tensor):
        return output.clone()
    return pytree.tree_map_only(Tensor, torch.clone, output)
