"""Runs an exported folder: chooses the graph, keeps the state of each stream, flushes, reports."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from eventful import ops
from eventful.config import checked_policy
from eventful.engine.exclusive import Exclusive
from eventful.errors import (
    ArtefactError,
    ConfigError,
    FrameError,
    NonFiniteError,
    SnapshotError,
)
from eventful.export.manifest import Manifest, dtype_name, read_manifest
from eventful.export.outputs import rebuild
from eventful.export.pure import Numbers
from eventful.export.runtimes.engine import Engine, Made, Memory
from eventful.export.subject import checked_params
from eventful.memory.snapshot import Snapshot, read_snapshot, write_snapshot
from eventful.memory.state import RowState
from eventful.policies import Policy, SelectionParams

_MARGIN = 1.125  # room for more tokens than wanted to pass at the last frame
REASONS = ("first", "asked", "failed", "scene")  # for computing a frame whole
_CPU = torch.device("cpu")
_RANGE = "The next frame is computed whole; check the range of the frames."


@dataclass(frozen=True, eq=False)
class RuntimeRecord:
    """What one step did.

    Attributes:
        updated: tokens that were recomputed.
        wanted: tokens that wanted to be; more than `updated` where they did not fit.
        tokens: N.
        width: slots of the graph that ran; N for the dense one.
        flushed: everything was recomputed.
        reason: why: `first`, `asked`, `failed` (the frame before raised an error), `scene` (a cut,
            or the estimated error lasted too long).
        estimate: estimated relative error of the output; None after a flush.
        ms: of the whole step.
        index: tokens that were recomputed, in no order; None for all.
        score: (N,) what tokens were ranked by; None after a flush.
    """

    updated: int
    wanted: int
    tokens: int
    width: int
    flushed: bool
    reason: str | None
    estimate: float | None
    ms: float
    index: Tensor | None
    score: Tensor | None


class Runtime:
    """The graphs of a folder that `eventful export` wrote, loaded once for any number of streams.

    Args:
        folder: with its manifest.
        threads: of the runtime; its own default if left out.
        precision: OpenVINO's: `f32`, or `bf16` where the processor has it; None for `f32`.
        verify: compare the digest of every file with the manifest first.

    Raises:
        ArtefactError: the folder is missing, damaged or was changed.
        MissingDependencyError: the runtime is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        threads: int | None = None,
        precision: str | None = None,
        verify: bool = True,
    ) -> None:
        if threads is not None and (type(threads) is not int or threads < 1):
            raise ConfigError(f"threads is a number from 1 on, or None; got {threads!r}.")
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder, verify=verify)
        self._engine = _engine(self.folder, self.manifest, threads, precision)

    def __repr__(self) -> str:
        made = self.manifest
        size = "x".join(map(str, made.frame["shape"][2:]))
        return f"Runtime({made.model}, {made.to}, {size}, r + {made.forced} in {made.widths})"

    def stream(self, policy: Policy | None = None) -> RuntimeStream:
        """A stream of its own; the first frame is computed whole.

        Args:
            policy: another one than the folder was exported with.
        """
        return RuntimeStream(self, policy)

    def load(self, snapshot: str | Path | bytes, policy: Policy | None = None) -> RuntimeStream:
        """A stream that goes on where a snapshot was taken, of `Stream` or of a runtime.

        Args:
            policy: another one than that of the snapshot.

        Raises:
            SnapshotError: it belongs to another model, rule or frame size.
        """
        content = read_snapshot(self.manifest.identity_on(_CPU), snapshot)
        taken = content.policies[0] if content.policies else None
        stream = RuntimeStream(self, taken if policy is None else policy)
        stream._take(content)
        if policy is not None:
            stream._known = None  # what another policy wanted
        return stream


class RuntimeStream:
    """One video through exported graphs; made by `Runtime.stream`."""

    def __init__(self, runtime: Runtime, policy: Policy | None = None) -> None:
        self._runtime, self._manifest = runtime, runtime.manifest
        self._memory: Memory = runtime._engine.memory()
        self._frames = -1  # since the last flush
        self._reason = "first"
        self._known: int | None = None  # tokens that wanted to pass at the last step
        self._record: RuntimeRecord | None = None
        self._busy = threading.Lock()
        self._set_policy(runtime.manifest.policy if policy is None else policy)

    def __repr__(self) -> str:
        return f"RuntimeStream({self._runtime!r}, {self._policy!r})"

    @property
    def policy(self) -> Policy:
        """The policy in force; another one may be assigned between frames.

        Tokens that do not fit into the widest step wait for the next frames.
        """
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        with Exclusive(self._busy):
            self._set_policy(policy)

    def _set_policy(self, policy: Policy) -> None:
        self._params: SelectionParams = checked_params(
            checked_policy(policy), self._manifest.tokens
        )
        self._policy, self._known = policy, None

    @property
    def last(self) -> RuntimeRecord | None:
        """What the last step did."""
        return self._record

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(
            math.prod(one.shape) * getattr(torch, one.dtype).itemsize
            for one in self._manifest.state
        )

    def flush(self) -> None:
        """Compute the next frame whole."""
        with Exclusive(self._busy):
            self._start_over("asked")

    def _start_over(self, reason: str) -> None:
        self._frames, self._reason = -1, reason

    def __call__(self, frame: Tensor) -> Any:
        """Step with one frame (1, C, height, width).

        Returns:
            What the model returns for it, in dicts, lists and tuples.

        Raises:
            FrameError: the frame has another size or dtype than was exported.
            NonFiniteError: it contains NaN or Inf, and the stream is as it was before; or they
                arose inside the model, and the next frame is computed whole.
        """
        with Exclusive(self._busy):
            frame = self._checked(frame)
            start = time.perf_counter()
            try:
                made, width, reason = self._step(frame)
            except BaseException:  # the state may be that of two frames
                self._start_over("failed")
                raise
            self._note(made, width, reason, 1e3 * (time.perf_counter() - start))
            return rebuild(self._manifest.skeleton, made.leaves)

    def _step(self, frame: Tensor) -> tuple[Made, int, str | None]:
        tokens = self._manifest.tokens
        if self._frames < 0:
            return self._flushed(frame), tokens, self._reason
        width = self._width()
        made = self._memory.step(frame, Numbers.of(self._params, self._frames + 1), width)
        if not made.report[1]:  # before the cut: an error without bound looks like one
            raise NonFiniteError(f"Numbers of the frame's tokens are NaN or Inf. {_RANGE}")
        if made.report[2] > 0:
            return self._flushed(frame), tokens, "scene"
        _check_sound(made)
        self._frames += 1
        return made, width, None

    def _flushed(self, frame: Tensor) -> Made:
        made = self._memory.flush(frame)
        _check_sound(made)
        self._frames = 0
        return made

    def _width(self) -> int:
        """Slots for the next step: the fewest that hold what the policy can let pass.

        Of a policy with a level as many as wanted to pass at the last frame, and some more.
        """
        widths, forced = self._manifest.widths, self._manifest.forced
        need = self._params.cap + forced
        if not self._params.fixed and self._known is not None:
            # What did not fit shows that more wanted to pass; a step may then be a size too small.
            need = min(need, math.ceil(self._known * _MARGIN))
        return next((one for one in widths if one >= need), widths[-1])

    def _note(self, made: Made, width: int, reason: str | None, ms: float) -> None:
        flushed, tokens = made.index is None, self._manifest.tokens
        updated = tokens if made.index is None else len(made.index)
        wanted = tokens if flushed else made.report[0]
        self._known = None if flushed else wanted
        estimate = None if flushed or made.report[5] < 0 else made.report[5] / ops.UNIT
        self._record = RuntimeRecord(
            updated, wanted, tokens, width, flushed, reason, estimate, ms, made.index, made.score
        )  # fmt: skip

    def _checked(self, frame: Any) -> Tensor:
        """The frame, if the graphs can take it."""
        about = self._manifest.frame
        shape, dtype = tuple(about["shape"]), about["dtype"]
        if not isinstance(frame, Tensor):
            try:
                frame = torch.as_tensor(frame)
            except (TypeError, ValueError, RuntimeError):
                raise FrameError(
                    f"A frame is a tensor or an array {shape} {dtype}; got a "
                    f"{type(frame).__name__}."
                ) from None
        if tuple(frame.shape) != shape or dtype_name(frame.dtype) != dtype:
            raise FrameError(
                f"The graphs take frames {shape} {dtype}, not {tuple(frame.shape)} "
                f"{dtype_name(frame.dtype)}. Resize the frame, or export the model for that size: "
                "eventful export MODEL --size HxW."
            )
        if not torch.isfinite(frame.sum(dtype=torch.float32)) and not frame.isfinite().all():
            raise NonFiniteError(
                "The frame contains NaN or Inf. It was not used and the stream is as it was; go "
                "on with the next good frame."
            )
        return frame.detach().cpu()

    @overload
    def snapshot(self, path: None = None) -> bytes: ...

    @overload
    def snapshot(self, path: str | Path) -> None: ...

    def snapshot(self, path: str | Path | None = None) -> bytes | None:
        """All that shapes the next frame, as `Stream.snapshot` writes it; `Stream.load` takes it.

        Raises:
            SnapshotError: the stream has seen no frame.
        """
        with Exclusive(self._busy):
            if self._frames < 0 and self._record is None:
                raise SnapshotError(
                    "The stream has seen no frame yet, so there is nothing to keep."
                )
            held = RowState(1)
            held.frames = [self._frames]
            for name, value in self._memory.read().items():
                held.tensors[name] = value if value.dim() == 1 else value[None]
            about = self._manifest.frame
            signature = (tuple(about["shape"]), self._manifest.dtype, _CPU, "")
            note = {"wanted": self._known, "reason": self._reason}
            content = Snapshot(held, [self._policy], signature, note)
            return write_snapshot(self._manifest.identity_on(_CPU), content, path)

    def _take(self, content: Snapshot) -> None:
        """Go on from a snapshot's content."""
        about = self._manifest.frame
        signature = content.signature
        if len(content.state) != 1 or signature is None or signature[0] != tuple(about["shape"]):
            raise SnapshotError(
                f"The snapshot is of {len(content.state)} videos with frames "
                f"{None if signature is None else signature[0]}; the graphs step one, with frames "
                f"{tuple(about['shape'])}."
            )
        if signature[1] is not self._manifest.dtype or signature[3]:
            raise SnapshotError(
                f"The snapshot is of {dtype_name(signature[1])} frames"
                f"{f' under autocast to {signature[3]}' if signature[3] else ''}; the graphs take "
                f"{about['dtype']} frames without autocast. Start a new stream."
            )
        held, taken = content.state.tensors, {}
        for one in self._manifest.state:
            value = held.get(one.name)
            if value is None and one.optional:
                continue
            if value is None or tuple(value.shape[1:] or (1,)) != one.shape:
                raise SnapshotError(f"The snapshot's {one.name} does not fit these graphs.")
            if dtype_name(value.dtype) != one.dtype:
                raise SnapshotError(
                    f"The snapshot's {one.name} is {dtype_name(value.dtype)}, and these graphs "
                    f"keep {one.dtype}. Start a new stream."
                )
            taken[one.name] = value if value.dim() == 1 else value[0]
        self._memory.write(taken)
        self._frames = content.state.frames[0]
        # Notes of a runtime; a snapshot of the library's `Stream` has none.
        wanted, reason = content.note.get("wanted"), content.note.get("reason")
        self._known = wanted if type(wanted) is int and wanted >= 0 else None
        self._reason = reason if reason in REASONS else "asked"


def _check_sound(made: Made) -> None:
    if not made.report[4]:
        raise NonFiniteError(f"NaN or Inf arose inside the model. {_RANGE}")


def _engine(folder: Path, manifest: Manifest, threads: int | None, precision: str | None) -> Engine:
    if precision is not None and manifest.to != "openvino":
        raise ArtefactError(
            f"precision={precision!r} is a setting of OpenVINO, and the folder is for "
            f"{manifest.to}. Export with --to openvino."
        )
    if manifest.to == "onnx":
        from eventful.export.runtimes.onnx import OnnxEngine

        return OnnxEngine(folder, manifest, threads)
    if manifest.to == "openvino":
        from eventful.export.runtimes.openvino import OpenVinoEngine

        return OpenVinoEngine(folder, manifest, threads, precision or "f32")
    from eventful.export.runtimes.aoti import AotiEngine

    return AotiEngine(folder, manifest, threads)
