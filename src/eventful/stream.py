"""Streams: videos through a converted model, one, or many in one forward pass."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn

from eventful.config import checked_policy
from eventful.engine.controlled import ControlledRunner
from eventful.engine.executor import Check, StepResult
from eventful.engine.frames import Signature, batched
from eventful.engine.identity import identity_of
from eventful.errors import FrameError, NonFiniteError, StreamNameError
from eventful.memory.snapshot import Snapshot, read_snapshot, write_snapshot
from eventful.memory.state import RowState
from eventful.policies import Policy

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that runs as it is where compiled code calls it.

    A stream's memory and checks would take minutes to trace, with nothing gained. Compiled parts of
    the model stay compiled.
    """
    made: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nobody compiles
            return function(*args, **kwargs)
        if not made:
            made.append(torch.compiler.disable(function))
        result: Result = made[0](*args, **kwargs)
        return result

    return run


class Stream(ControlledRunner):
    """One video through a converted model.

    `stream(frame)` returns what `model(frame)` returns. A batch of B frames is B videos
    stepped in lockstep; for videos that come and go use `StreamBatch`.

    Args:
        model: converted, or a model with a converted part.
        policy: overrides the config's; may be assigned between frames at any time.
        maps: keep error maps and update masks in `last`.
        check: on a GPU errors are reported at the next step. With `sync` each step waits and
            reports its own, as on a CPU. May be assigned between frames.
        budget: chooses the policy from frame to frame, see `eventful.budget`; may be assigned at
            any time, and takes effect at the next frame.
    """

    def __repr__(self) -> str:
        return f"Stream({self._about(self._policy)})"

    @property
    def policy(self) -> Policy | None:
        """The policy in force; assign another between frames to change the cost at once."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = checked_policy(policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Step with one frame; takes and returns what the model does."""
        return self.call("forward", *args, **kwargs)

    @_uncompiled
    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Step with another method of the model, e.g. `forward_intermediates`."""
        with self._alone():
            call = self._call_of(method, args, kwargs)
            streams = len(self._state) or call.frame.shape[0]
            fresh = len(self._state) == 0
            if fresh:
                self._executor = self._on_host(RowState(streams))
            try:
                return self._run_controlled(range(streams), [self._policy] * streams, call).output
            except BaseException:
                if fresh:
                    self._executor, self._planned = self._on_host(RowState(0)), None
                raise

    def _blank(self) -> RowState:
        return RowState(0)  # the next frame may have another batch, too

    def flush(self) -> None:
        """Recompute everything at the next frame, which must be like those before."""
        with self._alone():
            self._executor.settle()
            self._executor.flush(range(len(self._state)))

    @overload
    def snapshot(self, path: None = None) -> bytes: ...

    @overload
    def snapshot(self, path: str | Path) -> None: ...

    def snapshot(self, path: str | Path | None = None) -> bytes | None:
        """All that shapes the next frame, as safetensors: written to `path`, or else returned."""
        with self._alone():
            content = Snapshot(self._detached(), [self._policy] * len(self._state), self._signature)
            return write_snapshot(identity_of(self._session), content, path)

    @classmethod
    def load(
        cls,
        model: nn.Module,
        source: str | Path | bytes,
        *,
        maps: bool = False,
        check: Check = "async",
    ) -> Stream:
        """A stream that goes on where `snapshot` was taken, with the same model and config."""
        stream = cls(model, maps=maps, check=check)
        with torch.inference_mode(False):
            content = read_snapshot(identity_of(stream._session), source)
        stream._executor = stream._on_host(content.state)
        stream._signature = content.signature
        if content.policies:
            stream._policy = content.policies[0]
        stream._weights.remember(stream._weights.check(), ran=False)
        return stream


_SHOWN = 8  # names in a batch's repr


class StreamBatch(ControlledRunner):
    """Many videos in one forward pass; they join and leave at any frame.

    Streams that are not part of a call keep their state. On a CPU, stepping all of them, in
    the order they joined, copies nothing, and stepping some of them copies their state in and
    out; on a GPU the memory stays in place whichever are stepped.

    A frame that is not finite concerns its own stream alone: the others are stepped. On a CPU the
    call then raises a `NonFiniteError` with the names of the bad `streams`, the `good` ones and
    the model's `result` for those; on a GPU it returns, and the next call raises.
    """

    _partial = True

    def __repr__(self) -> str:
        names = [repr(name) for name in self.streams]
        if len(names) > _SHOWN:
            names = [*names[:_SHOWN], f"... {len(names)} in all"]
        shown = ", ".join(names) or "no streams"
        return f"StreamBatch({self._about(self._policy)}: {shown})"

    def _names(self) -> Sequence[str]:
        return self.streams

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in the order they joined."""
        return tuple(self._policies)

    @property
    def policy(self) -> Policy | None:
        """The policy of streams that join without one; assigning it sets it for all."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = checked_policy(policy)
        self._policies = dict.fromkeys(self._policies, self._policy)

    def join(
        self, name: str, policy: Policy | None = None, *, snapshot: str | Path | bytes | None = None
    ) -> None:
        """Add a stream, which flushes on its first frame or goes on from a snapshot."""
        with self._alone():
            if not isinstance(name, str):
                raise StreamNameError(
                    f"The name of a stream is a string, got {name!r}; e.g. join({str(name)!r})."
                )
            if name in self._policies:
                raise StreamNameError(f"Stream {name!r} is in the batch already; leave it first.")
            chosen = self._policy if policy is None else checked_policy(policy)
            content = (
                None if snapshot is None else read_snapshot(identity_of(self._session), snapshot)
            )
            if content is not None:
                self._check_snapshot(content)
            self._control.check_memory(len(self._policies) + 1)
            row = self._executor.add_row()
            self._policies[name] = chosen
            if content is not None:
                if not self._dense:  # a batch that runs dense has no use for it
                    self._state.put([row], content.state)
                self._signature = self._signature or batched(content.signature, None)
                self._policies[name] = content.policies[0] if policy is None else chosen

    def leave(self, name: str) -> None:
        """Forget a stream."""
        with self._alone():
            self._executor.leave(self._row(name))
            del self._policies[name]

    def set_policy(self, name: str, policy: Policy) -> None:
        """Change one stream's policy from its next frame on."""
        with self._alone():
            self._row(name)
            self._policies[name] = checked_policy(policy)

    def flush(self, name: str) -> None:
        """Recompute everything of one stream at its next frame."""
        with self._alone():
            self._executor.settle()
            self._executor.flush([self._row(name)])

    @overload
    def snapshot(self, name: str, path: None = None) -> bytes: ...

    @overload
    def snapshot(self, name: str, path: str | Path) -> None: ...

    def snapshot(self, name: str, path: str | Path | None = None) -> bytes | None:
        """One stream's snapshot, written to `path` or else returned; for `load` and `join`."""
        with self._alone():
            part = self._detached().take([self._row(name)])
            content = Snapshot(part, [self._policies[name]], batched(self._signature, 1))
            return write_snapshot(identity_of(self._session), content, path)

    def __len__(self) -> int:
        return len(self._policies)

    def __call__(self, *args: Any, streams: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Step streams: row i of the frames is `streams[i]`'s (all, in order, if left out)."""
        return self.call("forward", *args, streams=streams, **kwargs)

    @_uncompiled
    def call(
        self, method: str, *args: Any, streams: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        """Step with another method of the model, e.g. `forward_intermediates`."""
        with self._alone():
            call = self._call_of(method, args, kwargs)
            frames = call.frame
            names = self.streams if streams is None else _checked_names(streams)
            if not names:
                raise FrameError(
                    "`streams` is empty; name one stream for each frame."
                    if self._policies
                    else "The batch has no streams; call batch.join(name) first."
                )
            if len(set(names)) != len(names) or len(names) != frames.shape[0]:
                raise FrameError(
                    f"{frames.shape[0]} frames for {len(names)} streams {names}: pass one frame "
                    "for each of them, and name each once."
                )
            rows = [self._row(name) for name in names]
            policies = [self._policies[name] for name in names]
            try:
                done = self._run_controlled(rows, policies, call)
            except NonFiniteError as error:
                raise _with_names(error, names) from None
            if done.left_out:
                raise _left_out(done, names)
            return done.output

    def _row(self, name: str) -> int:
        try:
            return list(self._policies).index(name)
        except ValueError:
            known = ", ".join(self._policies) or "none"
            raise StreamNameError(
                f"No stream {name!r} in the batch (there: {known}); call batch.join first."
            ) from None

    def _expected(self, frame: Tensor) -> Signature | None:
        """Any number of frames may be stepped, so the batch size is not part of the signature."""
        return batched(self._signature, frame.shape[0])

    def _check_snapshot(self, content: Snapshot) -> None:
        if len(content.state) != 1:
            raise FrameError(
                f"The snapshot holds {len(content.state)} videos; a batch joins one at a time."
            )
        if self._signature is not None and batched(content.signature, None) != batched(
            self._signature, None
        ):
            raise FrameError(
                "The snapshot's frames differ in size, dtype or device from this batch's."
            )


def _checked_names(streams: Any) -> tuple[str, ...]:
    if isinstance(streams, str):
        raise StreamNameError(
            f"streams is a sequence of names, got the string {streams!r}; write "
            f"streams=[{streams!r}]."
        )
    names = tuple(streams) if isinstance(streams, Iterable) else (streams,)
    if not isinstance(streams, Iterable) or not all(isinstance(name, str) for name in names):
        raise StreamNameError(f"streams is a sequence of names, e.g. ['a', 'b']; got {streams!r}.")
    return names


def _with_names(error: NonFiniteError, names: tuple[str, ...]) -> NonFiniteError:
    """The error of a step that did not happen, with the names of the streams at fault."""
    if not error.rows or error.streams:
        return error
    bad = tuple(names[row] for row in error.rows)
    return NonFiniteError(f"{error} In the batch: {_listed(bad)}.", rows=error.rows, streams=bad)


def _left_out(done: StepResult, names: tuple[str, ...]) -> NonFiniteError:
    """The error of a step that left some streams out."""
    bad = tuple(names[row] for row in done.left_out)
    return NonFiniteError(
        f"The frame of {_listed(bad)} contains NaN or Inf. It was not used, and what is "
        "remembered of it is as it was. The other streams were stepped: what the model "
        "returned for error.good is in error.result. Go on with the next frames.",
        rows=tuple(done.left_out),
        streams=bad,
        good=tuple(name for name in names if name not in bad),
        result=done.output,
    )


def _listed(names: tuple[str, ...]) -> str:
    return f"stream{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
