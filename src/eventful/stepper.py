"""What one stream and a batch of streams share: guards around a step, and its transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eventful.adapters.base import Session
from eventful.config import Config
from eventful.conversion import find_session
from eventful.errors import (
    ConcurrentUseError,
    ConfigError,
    FrameError,
    GradientError,
    NonFiniteError,
    TrainingModeError,
    UnsupportedError,
)
from eventful.policies import Policy
from eventful.state import StreamState
from eventful.step import FlushRequired, Step, StepRecord
from eventful.weights import WeightGuard

Signature = tuple[tuple[int, ...], torch.dtype, torch.device]


class Stepper:
    """Owns the state of some streams and runs steps that either happen whole or not at all."""

    def __init__(self, model: nn.Module, *, maps: bool = False) -> None:
        session = find_session(model)
        if session is None:
            raise ConfigError(
                "This model is not converted; call eventful.convert(model, config) first."
            )
        self.model = model
        self.config: Config = session.config
        self.maps = maps
        self.last: StepRecord | None = None
        self._session: Session = session
        self._state = StreamState(0)
        self._signature: Signature | None = None
        self._weights = WeightGuard(session)
        self._busy = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of state held."""
        return self._state.nbytes

    def reset(self) -> None:
        """Forget everything; the next frame may have another size, and flushes."""
        with self._alone():
            self._state.clear()
            self._signature = None
            self._weights.forget()
            self.last = None

    def to(self, device: torch.device | str) -> Any:
        """Move the state to another device, after moving the model there."""
        with self._alone():
            self._state.map(lambda tensor: tensor.to(device))
            if self._signature is not None:
                shape, dtype, _ = self._signature
                probe = torch.empty(0, device=device)
                self._signature = (shape, dtype, probe.device)
            self._weights.forget()
        return self

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ConcurrentUseError(
                "This stream is being stepped by another thread. A stream is one video in order: "
                "give each thread its own Stream (they can share the model), or use a StreamBatch."
            )
        try:
            yield
        finally:
            self._busy.release()

    def _run(
        self,
        rows: Sequence[int],
        policies: Sequence[Policy | None],
        frame: Tensor,
        forward: Callable[[], Any],
    ) -> Any:
        """Step the streams in `rows`; on any exception the state is as it was."""
        self._check_call(frame)
        weights = self._weights.check()
        ready = _policies_set(policies)
        state = self._state.take(rows)
        try:
            result, record = self._attempt(state, ready, frame, forward, everything=False)
        except FlushRequired:
            result, record = self._attempt(state, ready, frame, forward, everything=True)
        self._state.put(rows, state)
        self._signature = _signature(frame)
        self._weights.remember(weights)
        self.last = record
        return result

    def _attempt(
        self,
        state: StreamState,
        policies: list[Policy],
        frame: Tensor,
        forward: Callable[[], Any],
        *,
        everything: bool,
    ) -> tuple[Any, StepRecord]:
        layouts = {
            name: adapter.layout(trunk, (frame.shape[-2], frame.shape[-1]))
            for name, (trunk, adapter) in self._session.trunks.items()
        }
        flushing = [everything or frames < 0 for frames in state.frames]
        step = Step(self.config, state, policies, flushing, layouts, self.maps)
        clock = _start_clock(frame.device)
        state.begin()
        self._session.step = step
        try:
            # Out of inference mode, or the state could only ever be written inside it.
            with torch.inference_mode(False), torch.no_grad():
                result = forward()
            if not step.record.gates:
                raise UnsupportedError(
                    "The call reached no converted block. Call the part of the model that holds "
                    "them, e.g. stream.call('forward_features', frame)."
                )
        except BaseException:
            state.rollback()
            raise
        finally:
            self._session.step = None
        state.frames = [
            0 if flush else n + 1 for flush, n in zip(step.flushing, state.frames, strict=True)
        ]
        state.commit()
        step.record.clock = clock()
        return result, step.record

    def _check_call(self, frame: Tensor) -> None:
        if frame.requires_grad and torch.is_grad_enabled():
            raise GradientError(
                "The frame requires gradients, which do not flow through a stream's memory. Call "
                "the model outside the stream to train, or pass frame.detach()."
            )
        modes = [self.model, *(trunk for trunk, _ in self._session.trunks.values())]
        if any(module.training for module in modes):
            raise TrainingModeError(
                "The model is in training mode: dropout and drop path would be remembered. Call "
                "model.eval() first."
            )
        if self._signature is not None and _signature(frame) != self._signature:
            raise FrameError(
                f"The stream holds {_describe(self._signature)}, this frame is "
                f"{_describe(_signature(frame))}. Convert the frame, or start over with "
                "stream.reset()."
            )
        if frame.is_floating_point() and not torch.isfinite(frame).all():
            raise NonFiniteError(
                "The frame contains NaN or Inf. It was not used and the stream is as it was; go on "
                "with the next good frame."
            )


def find_frame(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor passed by place, else the one under the name models use for frames."""
    named = [
        kwargs[key]
        for key in (getattr(model, "main_input_name", ""), "pixel_values")
        if key in kwargs
    ]
    for value in (*args, *named, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() >= 3:
            return value
    raise FrameError("No frame among the arguments: pass a tensor (B, C, height, width).")


def refuse_attentions(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise where the caller, or the model's own config, asks for attention maps."""
    wanted = kwargs.get(
        "output_attentions", getattr(getattr(model, "config", None), "output_attentions", None)
    )
    if wanted:
        raise UnsupportedError(
            "output_attentions=True: inside a stream attention maps are never whole. Call the "
            "model outside the stream, or switch output_attentions off."
        )


def _policies_set(policies: Sequence[Policy | None]) -> list[Policy]:
    ready = [policy for policy in policies if policy is not None]
    if len(ready) < len(policies):
        raise ConfigError(
            "No policy is set. Pass one to the preset, e.g. Config.paper(TopR(256)), or assign "
            "stream.policy = TopR(256) before the first frame."
        )
    return ready


def checked_policy(policy: Any) -> Policy:
    """The policy, if it is one."""
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"A policy needs an `order` and a `select`; got {policy!r}. Try TopR(256)."
        )
    return policy


def _signature(frame: Tensor) -> Signature:
    return tuple(frame.shape), frame.dtype, frame.device


def batched(signature: Signature | None, batch: int | None) -> Signature | None:
    """The signature with another batch size; None for any."""
    if signature is None:
        return None
    shape, dtype, device = signature
    return (-1 if batch is None else batch, *shape[1:]), dtype, device


def _describe(signature: Signature) -> str:
    shape, dtype, device = signature
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def _start_clock(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Start timing; calling the result stops, and gives a function that reads milliseconds."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()

        def stop_events() -> Callable[[], float]:
            end.record()

            def read() -> float:
                end.synchronize()
                return float(start.elapsed_time(end))

            return read

        return stop_events
    began = time.perf_counter()

    def stop() -> Callable[[], float]:
        elapsed = (time.perf_counter() - began) * 1000
        return lambda: elapsed

    return stop
