"""Streams: they own the state of videos and step frames through a converted model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful.adapters.base import Session
from eventful.config import Config
from eventful.convert import find_session
from eventful.errors import (
    ConcurrentUseError,
    ConfigError,
    FrameError,
    GradientError,
    NonFiniteError,
    StreamNameError,
    TrainingModeError,
    UnsupportedError,
)
from eventful.policies import Policy
from eventful.snapshot import Snapshot, read_snapshot, write_snapshot
from eventful.state import StreamState
from eventful.step import FlushRequired, Step, StepRecord
from eventful.weights import WeightGuard

Signature = tuple[tuple[int, ...], torch.dtype, torch.device]


class _Stepper:
    """What one stream and a batch of streams share: guards around a step, and its transaction."""

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
                "This stream is being stepped by another thread. A stream is one video in order: give "
                "each thread its own Stream (they can share the model), or use a StreamBatch."
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
        self._weights.check()
        ready = _policies_set(policies)
        state = self._state.take(rows)
        try:
            result, record = self._attempt(state, ready, frame, forward, everything=False)
        except FlushRequired:
            result, record = self._attempt(state, ready, frame, forward, everything=True)
        self._state.put(rows, state)
        self._signature = _signature(frame)
        self._weights.remember()
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
            with torch.no_grad():
                result = forward()
            if not step.record.gates:
                raise UnsupportedError(
                    "The call reached no converted block. Call the part of the model that holds them, "
                    "e.g. stream.call('forward_features', frame)."
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
                "The frame requires gradients, which do not flow through a stream's memory. Call the "
                "model outside the stream to train, or pass frame.detach()."
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
                f"{_describe(_signature(frame))}. Convert the frame, or call stream.reset() to start over."
            )
        if frame.is_floating_point() and not torch.isfinite(frame).all():
            raise NonFiniteError(
                "The frame contains NaN or Inf. It was not used and the stream is as it was; go on with "
                "the next good frame."
            )


class Stream(_Stepper):
    """One video through a converted model.

    `stream(frame)` returns what `model(frame)` returns. A batch of B frames is B videos
    stepped in lockstep; for videos that come and go use `StreamBatch`.

    Args:
        model: converted, or a model with a converted part.
        policy: overrides the config's; may be assigned between frames at any time.
        maps: keep error maps and update masks in `last`.
    """

    def __init__(
        self, model: nn.Module, policy: Policy | None = None, *, maps: bool = False
    ) -> None:
        super().__init__(model, maps=maps)
        self._policy = _checked(policy) if policy is not None else self.config.policy

    @property
    def policy(self) -> Policy | None:
        """The policy in force; assign another between frames to change the cost at once."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = _checked(policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("forward", *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Step with another method of the model, e.g. `forward_intermediates`."""
        with self._alone():
            frame = _find_frame(args, kwargs)
            _refuse_attentions(self.model, kwargs)
            target = self.model if method == "forward" else getattr(self.model, method)
            streams = len(self._state) or frame.shape[0]
            fresh = len(self._state) == 0
            if fresh:
                self._state = StreamState(streams)
            try:
                return self._run(
                    range(streams), [self._policy] * streams, frame, lambda: target(*args, **kwargs)
                )
            except BaseException:
                if fresh:
                    self._state = StreamState(0)
                raise

    def reset(self) -> None:
        """Forget everything; the next frame may have another size or batch, and flushes."""
        super().reset()
        self._state = StreamState(0)

    def flush(self) -> None:
        """Recompute everything at the next frame, which must be like those before."""
        with self._alone():
            self._state.frames = [-1] * len(self._state)

    def snapshot(self, path: str | Path | None = None) -> bytes:
        """All that shapes the next frame, as safetensors; written to `path` if given."""
        with self._alone():
            content = Snapshot(self._state, [self._policy] * len(self._state), self._signature)
            return write_snapshot(self._session, content, path)

    @classmethod
    def load(cls, model: nn.Module, source: str | Path | bytes, *, maps: bool = False) -> Stream:
        """A stream that goes on where `snapshot` was taken, with the same model and config."""
        stream = cls(model, maps=maps)
        content = read_snapshot(stream._session, source)
        stream._state, stream._signature = content.state, content.signature
        if content.policies:
            stream._policy = content.policies[0]
        stream._weights.remember()
        return stream


class StreamBatch(_Stepper):
    """Many videos in one forward pass; they join and leave at any frame.

    Streams that are not part of a call keep their state. Stepping all of them, in the
    order they joined, copies nothing; stepping some of them copies their state in and out.
    """

    def __init__(
        self, model: nn.Module, policy: Policy | None = None, *, maps: bool = False
    ) -> None:
        super().__init__(model, maps=maps)
        self._default = _checked(policy) if policy is not None else self.config.policy
        self._policies: dict[str, Policy | None] = {}

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in the order they joined."""
        return tuple(self._policies)

    def join(
        self, name: str, policy: Policy | None = None, *, snapshot: str | Path | bytes | None = None
    ) -> None:
        """Add a stream, which flushes on its first frame or goes on from a snapshot."""
        with self._alone():
            if name in self._policies:
                raise StreamNameError(f"Stream {name!r} is in the batch already; leave it first.")
            content = None if snapshot is None else read_snapshot(self._session, snapshot)
            if content is not None:
                self._check_snapshot(content)
            row = self._state.add_row()
            self._policies[name] = _checked(policy) if policy is not None else self._default
            if content is not None:
                self._state.put([row], content.state)
                self._signature = self._signature or _batched(content.signature, None)
                self._policies[name] = policy or content.policies[0]

    def leave(self, name: str) -> None:
        """Forget a stream."""
        with self._alone():
            self._state.drop_row(self._row(name))
            del self._policies[name]

    def set_policy(self, name: str, policy: Policy) -> None:
        """Change one stream's policy from its next frame on."""
        with self._alone():
            self._row(name)
            self._policies[name] = _checked(policy)

    def flush(self, name: str) -> None:
        """Recompute everything of one stream at its next frame."""
        with self._alone():
            self._state.frames[self._row(name)] = -1

    def snapshot(self, name: str, path: str | Path | None = None) -> bytes:
        """One stream's snapshot; `Stream.load` and `join` take it."""
        with self._alone():
            part = self._state.take([self._row(name)])
            content = Snapshot(part, [self._policies[name]], _batched(self._signature, 1))
            return write_snapshot(self._session, content, path)

    def __len__(self) -> int:
        return len(self._policies)

    def __call__(self, *args: Any, streams: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Step streams: row i of the frames belongs to `streams[i]` (all, in order, if left out)."""
        with self._alone():
            frames = _find_frame(args, kwargs)
            names = self.streams if streams is None else tuple(streams)
            if not names:
                raise FrameError("The batch has no streams; call batch.join(name) first.")
            if len(set(names)) != len(names) or len(names) != frames.shape[0]:
                raise FrameError(
                    f"{frames.shape[0]} frames for {len(names)} streams {names}: pass one frame for "
                    "each distinct stream."
                )
            _refuse_attentions(self.model, kwargs)
            rows = [self._row(name) for name in names]
            policies = [self._policies[name] for name in names]
            return self._run(rows, policies, frames, lambda: self.model(*args, **kwargs))

    def _row(self, name: str) -> int:
        try:
            return list(self._policies).index(name)
        except ValueError:
            known = ", ".join(self._policies) or "none"
            raise StreamNameError(
                f"No stream {name!r} in the batch (there: {known}); call batch.join({name!r}) first."
            ) from None

    def _check_call(self, frame: Tensor) -> None:
        """Any number of frames may be stepped, so the batch size is not part of the signature."""
        held = self._signature
        self._signature = _batched(held, frame.shape[0])
        try:
            super()._check_call(frame)
        except BaseException:
            self._signature = held
            raise

    def _check_snapshot(self, content: Snapshot) -> None:
        if len(content.state) != 1:
            raise FrameError(
                f"The snapshot holds {len(content.state)} videos; a batch joins one at a time."
            )
        if self._signature is not None and _batched(content.signature, None) != _batched(
            self._signature, None
        ):
            raise FrameError(
                "The snapshot's frames differ in size, dtype or device from this batch's."
            )


def _find_frame(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() >= 3:
            return value
    raise FrameError("No frame among the arguments: pass a tensor (B, C, height, width).")


def _refuse_attentions(model: nn.Module, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get(
        "output_attentions", getattr(getattr(model, "config", None), "output_attentions", None)
    )
    if wanted:
        raise UnsupportedError(
            "output_attentions=True: inside a stream attention maps are never whole. Call the model "
            "outside the stream, or switch output_attentions off."
        )


def _policies_set(policies: Sequence[Policy | None]) -> list[Policy]:
    ready = [policy for policy in policies if policy is not None]
    if len(ready) < len(policies):
        raise ConfigError(
            "No policy is set. Pass one to the preset, e.g. Config.paper(TopR(256)), or assign "
            "stream.policy = TopR(256) before the first frame."
        )
    return ready


def _checked(policy: Any) -> Policy:
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"A policy needs an `order` and a `select`; got {policy!r}. Try TopR(256)."
        )
    return policy


def _signature(frame: Tensor) -> Signature:
    return tuple(frame.shape), frame.dtype, frame.device


def _batched(signature: Signature | None, batch: int | None) -> Signature | None:
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
