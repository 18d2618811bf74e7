"""Steps of one source through a model: in a stream, dense, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful import files
from eventful.budget.audit import comparable, compare
from eventful.config import Config
from eventful.cost.counting import count_backbone
from eventful.cost.times import start_clock
from eventful.errors import SnapshotError
from eventful.models.blocks import at_size
from eventful.pipeline.folder import read_state
from eventful.pipeline.predictions import Prediction
from eventful.pipeline.settings import RunSettings
from eventful.pipeline.subject import Prepared, ReadySubject
from eventful.rules.record import StepRecord
from eventful.stream import Stream
from eventful.surgery.conversion import block_shapes, convert
from eventful.surgery.inspection import inspect


@dataclass(frozen=True)
class Stepped:
    """What one step gave.

    Attributes:
        ms: milliseconds of the step; `dense_ms` of the whole model on the same frame.
        record: of the stream; None where the whole model ran.
        error: |features - dense features| / |dense features|.
        operations: multiply-adds; `dense_operations` of the whole model.
        dense: the prediction of the whole model.
    """

    prediction: Prediction
    ms: float
    tokens: int
    updated: float
    operations: float
    dense_operations: float
    record: StepRecord | None = None
    dense: Prediction | None = None
    dense_ms: float | None = None
    error: float | None = None


class Stepper:
    """Runs the model on the frames of one source.

    Args:
        maps: keep which tokens were updated, to draw them.
    """

    def __init__(self, ready: ReadySubject, settings: RunSettings, *, maps: bool) -> None:
        self.ready, self._maps = ready, maps
        self._head = ready.head()
        self._dense = _Dense(ready) if settings.dense or settings.compare else None
        self._stream: Stream | None = None
        self._tap: _Tap | None = None
        self._budget = settings.budget()
        self._spent = 0  # operations of all steps, where steps may be followed by dense ones
        if not settings.dense:
            self._converted = convert(ready.model, settings.update_rule())
            if settings.compare:
                self._tap = _Tap(ready.feature_part(self._converted))
            self._stream = Stream(self._converted, maps=maps, budget=self._budget)

    @property
    def nbytes(self) -> int:
        """Bytes that the stream keeps."""
        return 0 if self._stream is None else self._stream.nbytes

    def step(self, prepared: Prepared) -> Stepped:
        """Run one step."""
        whole = self._dense
        if self._stream is None:
            assert whole is not None
            output, ms, _ = whole.run(prepared)
            tokens, operations = whole.cost
            return Stepped(output, ms, tokens, tokens, operations, operations)
        output, took = _timed(prepared, self._call)
        features = output if self._tap is None else self._tap.taken(output)
        prediction = self.ready.read(self._head(output), prepared)
        record = self._stream.last
        assert record is not None
        tokens = sum(layout.tokens for layout in record.layouts.values())
        stepped = Stepped(
            prediction,
            took(),
            tokens,
            record.fraction * tokens,
            self._operations(record),
            record.dense_macs,
            record,
        )
        if whole is None:
            return stepped
        dense, dense_ms, dense_features = whole.run(prepared)
        error = _error(features, dense_features)
        return replace(stepped, dense=dense, dense_ms=dense_ms, error=error)

    def flush(self) -> None:
        """Compute everything anew at the next step."""
        if self._stream is not None:
            self._stream.flush()

    def restart(self) -> None:
        """Flush, and forget the steps of a clip: what comes next does not follow on them."""
        self.flush()
        self._head = self.ready.head()
        if self._dense is not None:
            self._dense.head = self.ready.head()

    def save(self, path: Path) -> bool:
        """Write what is remembered; whether there is anything, and it can be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if self._stream is not None:
                self._stream.snapshot(path)
        except SnapshotError:  # no frame yet, or a policy of the user's own
            return False
        memory = {f"own/{name}": value for name, value in self._head.memory().items()}
        if self._dense is not None:
            kept = self._dense.head.memory()
            memory |= {f"dense/{name}": value for name, value in kept.items()}
        if memory:
            from safetensors.torch import save

            held = {name: value.contiguous().cpu() for name, value in memory.items()}
            files.write_bytes(_memory_file(path), save(held))
        return True

    def restore(self, path: Path) -> bool:
        """Go on from what `save` wrote; False for a dense run, whose stream remembers nothing.

        Raises:
            SnapshotError: It is damaged, or does not fit this model. The stream is a new one.
        """
        memory = read_state(_memory_file(path))
        if self._stream is not None:
            self._stream = Stream.load(self._converted, path, maps=self._maps)
            self._stream.budget = self._budget
        self._head.restore(_behind(memory, "own/"))
        if self._dense is not None:
            self._dense.head.restore(_behind(memory, "dense/"))
        return self._stream is not None

    def close(self) -> None:
        """Give the memory back."""
        if self._stream is not None:
            self._stream.close()
        for tap in (self._tap, None if self._dense is None else self._dense.tap):
            if tap is not None:
                tap.remove()

    def _call(self, *args: Any) -> Any:
        assert self._stream is not None
        return self._stream.call(self.ready.method, *args)

    def _operations(self, record: StepRecord) -> float:
        """Of the last step; those of a dense step behind it, on the same frame, come on top."""
        if self._budget is None or not self._budget.audits:
            return record.macs
        assert self._stream is not None
        total = self._stream.summary().operations
        self._spent, last = total, total - self._spent
        return last


class _Dense:
    """The whole model, without memory.

    Attributes:
        cost: tokens of a frame, and operations; 0 for a model that is not known.
    """

    def __init__(self, ready: ReadySubject) -> None:
        self._ready, self.head = ready, ready.head()
        self._model = at_size(ready.model, ready.size)
        self.tap = _Tap(ready.feature_part(self._model))
        self.cost = dense_cost(ready.model, ready.size)

    def run(self, prepared: Prepared) -> tuple[Prediction, float, Any]:
        """The prediction, milliseconds, and features to compare with."""
        with torch.no_grad():
            output, took = _timed(prepared, getattr(self._model, self._ready.method))
        features = self.tap.taken(output)
        return self._ready.read(self.head(output), prepared), took(), features


class _Tap:
    """The output of a part of a model, as it was last computed."""

    def __init__(self, part: nn.Module | None) -> None:
        self._last: Any = None
        self._hook = None if part is None else part.register_forward_hook(self._take)

    def taken(self, output: Any) -> Any:
        """What the part gave, or the output where the whole model is meant."""
        if self._hook is None:
            return output
        last, self._last = self._last, None
        return last

    def remove(self) -> None:
        """Leave the model as it was."""
        if self._hook is not None:
            self._hook.remove()

    def _take(self, part: nn.Module, given: Any, output: Any) -> None:
        # Cloned: a stream writes its next output into the same memory.
        self._last = output.detach().clone() if isinstance(output, Tensor) else output


def _timed(prepared: Prepared, call: Callable[..., Any]) -> tuple[Any, Callable[[], float]]:
    """An output, and a function that gives its milliseconds."""
    frame = prepared.args[0]
    stop = start_clock(frame.device)
    output = call(*prepared.args)
    return output, stop()


def _error(output: Any, dense: Any) -> float | None:
    """The relative error, of all tensors that both have; None where there is nothing to compare."""
    if output is None or dense is None:
        return None
    pairs = comparable(output, dense, 1)
    return float(compare(pairs)[0]) if pairs else None


def dense_cost(model: nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """Tokens of a frame, and operations of the whole model; 0 for a model that is not known."""
    seen = inspect(model, size)
    if not seen.matched:  # a dense model needs no known blocks
        return 0, 0
    shapes = block_shapes(model, size, Config.tokenwise())
    return sum(seen.tokens.values()), count_backbone(shapes).total


def _memory_file(snapshot: Path) -> Path:
    return snapshot.with_suffix(".memory")


def _behind(memory: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)}
