"""Steps that live on the device: slots for the memory, recorded work for every shape of step.

A step of B streams with M slots to each selection always launches the same kernels on the
same addresses: frames, dials and the numbers of the streams' slots are copied to fixed places
first. On CUDA it is recorded on its second use as two graphs, one up to the choice of tokens
and one for the rest, so that the host learns what was chosen while the blocks still run. Of a
model that asks the host itself, as detectors do, the blocks alone are recorded.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from eventful import ops
from eventful.config import Config
from eventful.engine.call import Call
from eventful.engine.graphs import (
    Recorded,
    Recorder,
    Replay,
    Tape,
    Unlike,
    uncached_casts,
    waits,
)
from eventful.engine.guard import Census
from eventful.engine.probe import Probe
from eventful.engine.work import (
    HostPlaces,
    Outcome,
    Work,
    counts_in,
    current_stream,
    mark,
    places_for,
    record_of,
)
from eventful.errors import UnsupportedError
from eventful.memory.slots import SlotPool, SlotState
from eventful.policies import Dials, Policy, dials_of, refresh_period
from eventful.rules.step import Resident, Step
from eventful.tokens.layout import TokenLayout

Launch = Callable[[Step, Callable[[], Any]], Any]  # runs a forward call as a step

DEVICES = {"cuda"}  # where steps are resident
_MARGIN = 1.125  # room for more tokens than passed at the last frame
_MANY = 4  # streams for which recorded work is tied to their slots
MOST_WORKS = 32  # shapes of step whose recordings are kept
_FIRST_SHARE = 0.25  # of the tokens, before a threshold's first count is known


def why_not(
    config: Config, policies: Sequence[Policy], device: torch.device, *, plain: bool
) -> str | None:
    """Why a step cannot be resident; None if it can.

    Args:
        plain: all attention is global, without relative position.
    """
    if device.type not in DEVICES:
        return f"steps on {device.type} ask the host"
    if config.reference != "update" or config.attention not in ("query", "exact"):
        return "there are no kernels for the published rules, which are here to be compared with"
    if config.gating == "operator" and not plain:
        return "gates around operators have no kernels for windows and relative position"
    if config.pool != 1:
        return "keys are pooled"
    if any(policy.order != 2 or dials_of(policy, 1) is None for policy in policies):
        return "a policy cannot be put into numbers"
    forced = ops.forced_backend()
    if device.type == "cuda" and forced not in (None, "triton"):
        return f"backend {forced!r} is forced"
    if device.type == "cuda":
        return ops.why_not(
            "triton", "attend_windows", *[torch.empty(1, 1, 1, 1, device=device)] * 3
        )
    return None


def bucket(count: int, tokens: int, *, steady: bool = False) -> int:
    """The number of slots that serves `count` tokens: few different ones, little padding.

    Args:
        steady: the count does not change from frame to frame, so one number serves all of them.
    """
    step = 8 if tokens < 512 else 64
    while tokens >= 512 and count > 8 * step:  # beyond 512, less than a fifth is padding
        step *= 2
    step = min(step, 16) if steady else step
    return min(tokens, max(step, -(-count // step) * step))


class Residence:
    """The slots and the recorded work of one model, for frames of one shape, dtype and device."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pool = SlotPool()
        self.constants: dict[Any, Any] = {}
        self._works: OrderedDict[Hashable, Work] = OrderedDict()
        self._generation = 0
        self._seen: list[Census] = []  # of streams whose weights are those in use
        self._probe = Probe([])  # of these weights, and what it read of them
        self._contents: list[Tensor] = []
        self._memory: Any = None
        self._side: Any = None
        self._last_stream: Any = None
        self.one = threading.Lock()  # one step at a time: threads share the fixed places

    def use_weights(self, census: Census) -> None:
        """Forget what was made for other weights."""
        if self._seen and (census is self._seen[0] or any(census is seen for seen in self._seen)):
            return
        if not self._seen or not census.agrees(self._seen[0]):
            self._seen.clear()
            self.constants.clear()
            self._drop_works()
            self._probe = Probe(census.parameters)
            self._contents = self._probe.values()
        self._seen = [census, *self._seen[:63]]

    def _probe_weights(self, report: Tensor) -> None:
        """Report whether weights were written to past torch's version counters."""
        found = self._probe.difference(self._contents)
        if found:
            report[:, 4] = torch.stack(found).any()

    @property
    def idle(self) -> bool:
        """Whether no stream has its memory here."""
        return self.pool.used == 0

    def close(self) -> None:
        """Give up the memory of the slots and all recorded work."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # recorded work may still be running
        self._drop_works()
        self._seen.clear()
        self._probe, self._contents = Probe([]), []
        self.constants.clear()
        self.pool.close()

    def _drop_works(self) -> None:
        self._works.clear()
        self._memory = None  # a memory pool ends with the last of its graphs

    def _let_go_of_pool(self) -> None:
        """A memory pool ends with the last of its graphs; the next one needs another."""
        if all(work.tape is None for work in self._works.values()):
            self._memory = None

    def _work(self, key: Hashable, frame: Tensor, batch: int) -> Work:
        """The work of one shape of step; the one not used for longest makes room."""
        if key not in self._works:
            if len(self._works) >= MOST_WORKS:
                if frame.is_cuda:
                    torch.cuda.synchronize(frame.device)  # it may still be running
                self._works.popitem(last=False)
                self._let_go_of_pool()
            self._works[key] = places_for(frame, batch)
        self._works.move_to_end(key)
        return self._works[key]

    def forced(self, layout: TokenLayout, depth: int) -> int:
        """Most tokens that pass a gate whatever their error."""
        special = layout.prefix + layout.suffix if self.config.protect else 0
        if self.config.max_age is None:
            return special
        return special + -(-layout.tokens // refresh_period(self.config.max_age, depth))

    def width(
        self, dials: Sequence[Dials], passed: Sequence[int | None], tokens: int, forced: int
    ) -> int:
        """Slots for the selections of a step.

        Args:
            passed: tokens that each stream's policy let pass at its last step, the most at any
                gate; None if that is not known.
            forced: see `forced`.
        """
        steady, need = True, 1
        for dial, last in zip(dials, passed, strict=True):
            most = dial.cap + forced
            if dial.level != -math.inf and not self.config.deterministic:
                guess = tokens * _FIRST_SHARE if last is None else last * _MARGIN
                most, steady = min(most, math.ceil(guess)), False
            need = max(need, most)
        return bucket(min(need, tokens), tokens, steady=steady)

    def _follow_stream(self, device: torch.device) -> None:
        """Steps queued on different CUDA streams come one after another all the same."""
        stream = current_stream(device)
        if self._last_stream is not None and stream is not self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    def step(
        self,
        call: Call,
        state: SlotState,
        dials: list[Dials],
        policies: list[Policy],
        layouts: dict[str, TokenLayout],
        width: int,
        launch: Launch,
        host: HostPlaces,
        *,
        flush: bool,
        dense: bool,
        maps: bool,
        capture: bool,
    ) -> Outcome:
        """Run one step of the streams in `state`; its caller holds `one`.

        Args:
            flush: recompute everything; there may be no memory yet.
            dense: recompute everything, and count the tokens that wanted to pass.
        """
        self._follow_stream(call.frame.device)
        if self.pool.generation != self._generation:
            self._drop_works()
            self._generation = self.pool.generation
        noisy = any(dial.noise is not None for dial in dials)
        # Stock attention is the faster one for many streams, but knows no slots: work of its own.
        batch = len(state.rows)
        state.fixed = batch >= _MANY and state.in_a_row
        where = state.rows[0] if state.fixed else None
        precision = _precision(call.frame.device)
        key = (batch, width, flush, dense, noisy, maps, call.key(), where, precision)
        work = self._work(key, call.frame, batch)
        host.set_dials(state, dials)
        work.dials.copy_(host.dials, non_blocking=True)
        work.uses += 1
        work.asks = work.asks if call.plain else True
        cuda = call.frame.is_cuda

        def unpack(step: Step) -> None:
            """The dials where the step reads them."""
            whole, real = work.dials[:3].long(), work.dials[3:].float()
            state.slots, state.good = whole[0], None
            resident = step.resident
            assert resident is not None
            resident.turn, resident.cap, resident.level = whole[1], whole[2], real[0]
            resident.noise = real[1:] if noisy else None

        def start(step: Step) -> Any:
            work.frame.copy_(call.frame, non_blocking=True)
            unpack(step)
            return call.on(work.frame).run()

        def fresh() -> Step:
            none = work.report[:, 0]
            resident = Resident(width, none, none, none, None, work.report, work.sound, dense)
            return Step(
                self.config, state, policies, [flush or dense] * len(state), layouts, maps,
                constants=self.constants, resident=resident,
            )  # fmt: skip

        told: list[Any] = []

        def gated() -> None:
            self._probe_weights(work.report)
            tell()

        def tell() -> None:
            host.report.copy_(work.report, non_blocking=True)
            told.append(mark(self._last_stream))

        recordable = cuda and capture and work.uses > 1 and not work.refused
        if recordable and work.tape is None and work.asks is not None:
            self._record(work, call, fresh(), launch, unpack)
        if recordable and work.tape is not None:
            try:
                result = self._replay(work, call, fresh, launch, host, tell)
            except Unlike:
                work.refused, work.tape, work.blocks = True, None, None
            else:
                assert work.numbers is not None
                assert work.record is not None
                record = partial(record_of, work.record, work.counts, work.numbers.clone())
                if maps:
                    made = record()
                    record = partial(lambda value: value, made)
                return Outcome(
                    result, record, host.report, host.sound, told[0], True, not work.asks
                )
        step = fresh()
        assert step.resident is not None
        step.resident.gated = gated
        with waits(cuda and work.asks is None) as found:
            result = launch(step, lambda: start(step))
        if work.asks is None and (not found or work.uses > 1):  # at first it may be a compiler
            work.asks = bool(found)
        host.sound.copy_(work.sound, non_blocking=True)
        able = cuda and capture and not work.refused
        return Outcome(
            result, lambda: step.record, host.report, host.sound, told[0] if told else None,
            whole=None if able and work.asks is None else able and not work.asks,
        )  # fmt: skip

    def _replay(
        self, work: Work, call: Call, fresh: Callable[[], Step], launch: Launch,
        host: HostPlaces, tell: Callable[[], None],
    ) -> Any:  # fmt: skip
        """Launch recorded work, inside a step of the model that runs around it if one does."""

        def play() -> None:
            assert work.tape is not None
            work.tape.play(tell)
            host.sound.copy_(work.sound, non_blocking=True)

        if work.blocks is not None:
            step = fresh()

            def play_in_step() -> None:
                play()
                assert work.record is not None
                step.record.gates, step.record.blocks = work.record.gates, work.record.blocks

            step.track = Replay(work.blocks, play_in_step)
            return launch(step, call.run)
        work.frame.copy_(call.frame, non_blocking=True)
        play()
        if isinstance(work.result, Tensor):
            return work.result.clone()
        return pytree.tree_map_only(Tensor, torch.clone, work.result)

    def _record(
        self, work: Work, call: Call, step: Step, launch: Launch, unpack: Callable[[Step], None]
    ) -> None:
        """Record a step that ran before as two graphs; on failure it stays as it is."""
        device = call.frame.device
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        self._side = self._side or torch.cuda.Stream(device)
        tape = Tape(device, self._memory, self._side)
        assert step.resident is not None

        def gated() -> None:
            self._probe_weights(work.report)
            tape.switch()

        step.resident.gated = gated

        def begin() -> None:
            tape.begin()
            unpack(step)

        def finish() -> None:
            work.record, work.counts = step.record, counts_in(step.record)
            work.numbers = torch.stack([count.long() for count in work.counts])
            tape.end()

        def whole() -> Any:
            begin()
            result = call.on(work.frame).run()
            finish()
            return result

        try:
            with uncached_casts():
                if work.asks:
                    step.track = recorder = Recorder(begin, finish)
                    with contextlib.suppress(Recorded):
                        launch(step, call.run)
                    work.blocks = recorder.blocks
                else:
                    work.result = launch(step, whole)
            if not tape.complete:
                raise UnsupportedError("The call ended ahead of the last block.")
            work.tape = tape
        except BaseException as error:
            tape.abandon()
            work.blocks = None
            self._let_go_of_pool()
            if not isinstance(error, Exception):
                raise
            if not work.asks:
                work.asks = True  # the blocks alone, next time
                return
            work.refused = True
            warnings.warn(
                "This model's step cannot be recorded as a CUDA graph, so every frame launches "
                f"its kernels anew. {type(error).__name__}: {str(error)[:300]}",
                stacklevel=2,
            )


def _precision(device: torch.device) -> Hashable:
    """What a user may switch between frames: autocast, and products in TF32."""
    kind = device.type
    on = torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if on else None
    # What torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32 read.
    return cast, torch._C._get_cublas_allow_tf32(), torch._C._get_cudnn_allow_tf32()


_MOST_KINDS = 4  # kinds of frame whose memory and recordings are kept without a stream


def residence_of(home: dict[Any, Residence], key: Any, config: Config) -> Residence:
    """The residence of a model for one kind of frame, made on first use.

    Of the kinds without a stream those not used for longest are given up.
    """
    found = home.pop(key, None) or Residence(config)
    home[key] = found  # the last is the one used last
    idle = [kind for kind, held in home.items() if held.idle and kind != key]
    for kind in idle[: max(0, len(idle) + 1 - _MOST_KINDS)]:
        home.pop(kind).close()
    return found
