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
from eventful.errors import (
    ArtefactError,
    ConcurrentUseError,
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
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class RuntimeRecord:
    """What one step did.

    Attributes:
        updated: tokens that were recomputed.
        wanted: tokens that wanted to be; more than `updated` where they did not fit.
        tokens: N.
        width: slots of the graph that ran; N for the dense one.
        flushed: everything was recomputed.
        reason: why: `first`, `asked`, `scene` (a cut, or the estimated error lasted too long).
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

    def load(self, snapshot: str | Path | bytes) -> RuntimeStream:
        """A stream that goes on where a snapshot was taken, of `Stream` or of a runtime.

        Raises:
            SnapshotError: it belongs to another model, rule or frame size.
        """
        content = read_snapshot(self.manifest.identity_on(_CPU), snapshot)
        policy = content.policies[0] if content.policies else None
        stream = RuntimeStream(self, policy)
        stream._take(content)
        return stream


class RuntimeStream:
    """One video through exported graphs; made by `Runtime.stream`."""

    def __init__(self, runtime: Runtime, policy: Policy | None = None) -> None:
        self._runtime, self._manifest = runtime, runtime.manifest
        self._memory: Memory = runtime._engine.memory()
        self._frames = -1  # since the last flush
        self._reason = "first"
        self._known: tuple[int, bool] | None = None
        self._record: RuntimeRecord | None = None
        self._busy = threading.Lock()
        self.policy = runtime.manifest.policy if policy is None else policy

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
        self._frames, self._reason = -1, "asked"

    def __call__(self, frame: Tensor) -> Any:
        """Step with one frame (1, C, height, width).

        Returns:
            What the model returns for it, in dicts, lists and tuples.

        Raises:
            FrameError: the frame has another size or dtype than was exported.
            NonFiniteError: it contains NaN or Inf; the stream is as it was before.
        """
        if not self._busy.acquire(blocking=False):
            raise ConcurrentUseError(
                "This stream is in the middle of a step in another thread. Open one stream for "
                "each video: runtime.stream()."
            )
        try:
            frame = self._checked(frame)
            start = time.perf_counter()
            made, width, reason = self._step(frame)
            self._note(made, width, reason, 1e3 * (time.perf_counter() - start))
            return rebuild(self._manifest.skeleton, made.leaves)
        finally:
            self._busy.release()

    def _step(self, frame: Tensor) -> tuple[Made, int, str | None]:
        tokens = self._manifest.tokens
        if self._frames < 0:
            return self._flushed(frame), tokens, self._reason
        width = self._width()
        made = self._memory.step(frame, Numbers.of(self._params, self._frames + 1), width)
        if made.report[2] > 0:
            return self._flushed(frame), tokens, "scene"
        self._frames += 1
        return made, width, None

    def _flushed(self, frame: Tensor) -> Made:
        made = self._memory.flush(frame)
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
            need = min(need, math.ceil(self._known[0] * _MARGIN))
        return next((one for one in widths if one >= need), widths[-1])

    def _note(self, made: Made, width: int, reason: str | None, ms: float) -> None:
        if not made.report[4]:
            self._frames, self._reason = -1, "asked"
            raise NonFiniteError(
                "NaN or Inf arose inside the model. The next frame is computed whole; check the "
                "frame's range."
            )
        flushed, tokens = made.index is None, self._manifest.tokens
        updated = tokens if made.index is None else len(made.index)
        wanted = tokens if flushed else made.report[0]
        self._known = None if flushed else (wanted, wanted > updated)
        estimate = None if flushed or made.report[5] < 0 else made.report[5] / ops.UNIT
        self._record = RuntimeRecord(
            updated, wanted, tokens, width, flushed, reason, estimate, ms, made.index, made.score
        )  # fmt: skip

    def _checked(self, frame: Any) -> Tensor:
        """The frame, if the graphs can take it."""
        about = self._manifest.frame
        shape, dtype = tuple(about["shape"]), about["dtype"]
        if not isinstance(frame, Tensor):
            frame = torch.as_tensor(frame)
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
        if self._frames < 0 and self._record is None:
            raise SnapshotError("The stream has seen no frame yet, so there is nothing to keep.")
        held = RowState(1)
        held.frames = [self._frames]
        for name, value in self._memory.read().items():
            held.tensors[name] = value if value.dim() == 1 else value[None]
        about = self._manifest.frame
        signature = (tuple(about["shape"]), self._manifest.dtype, _CPU, "")
        content = Snapshot(held, [self._policy], signature)
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
        held, taken = content.state.tensors, {}
        for one in self._manifest.state:
            value = held.get(one.name)
            if value is None and one.optional:
                continue
            if value is None or tuple(value.shape[1:] or (1,)) != one.shape:
                raise SnapshotError(f"The snapshot's {one.name} does not fit these graphs.")
            taken[one.name] = value if value.dim() == 1 else value[0]
        self._memory.write(taken)
        self._frames = content.state.frames[0]


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
