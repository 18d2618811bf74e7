"""Sources whose frames have one size: one batch of streams, or the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eventful.config import PRESETS, Config
from eventful.cost.times import start_clock
from eventful.errors import UnsupportedError
from eventful.live.channels import StepNumbers
from eventful.models.blocks import at_size
from eventful.pipeline.annotate import grid_of_picture
from eventful.pipeline.predictions import Prediction
from eventful.pipeline.settings import made_config
from eventful.pipeline.stepping import dense_cost
from eventful.pipeline.subject import Head, Prepared, ReadySubject
from eventful.policies import Policy, TopFraction
from eventful.rules.record import StepRecord
from eventful.stream import StreamBatch
from eventful.surgery.conversion import convert

DENSE = "dense"
CHOICES = (*PRESETS, DENSE)
SHARE = 0.2  # of the tokens, for presets that have no policy of their own


@dataclass(frozen=True)
class Result:
    """What one step gave for one source; maps are (h, w), see `channels.Shown`."""

    prediction: Prediction
    numbers: StepNumbers
    updated: Tensor | None = None
    error: Tensor | None = None


def needs_share(preset: str) -> bool:
    """Whether a preset runs only with a share of the tokens."""
    return preset != DENSE and Config.preset(preset).policy is None


class Group:
    """A model set up for frames of one size, and the streams of the sources that have it.

    Args:
        preset: one of `CHOICES`.
        share: of the tokens to update; None for the preset's own policy.
        maps: keep which tokens were updated, to draw them.
    """

    def __init__(
        self, ready: ReadySubject, preset: str, share: float | None, *, maps: bool = True
    ) -> None:
        self.ready, self.preset = ready, preset
        self.dense_ms: float | None = None
        self._whole = at_size(ready.model, ready.size)
        self._heads: dict[str, Head] = {}
        self._batch: StreamBatch | None = None
        self._cost: tuple[int, int] | None = None
        if preset != DENSE:
            self._own = Config.preset(preset).policy
            config = made_config(preset, self._policy(share), needed=False)
            self._batch = StreamBatch(convert(ready.model, config), maps=maps)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the sources."""
        return tuple(self._heads)

    @property
    def nbytes(self) -> int:
        """Bytes that the streams keep."""
        return 0 if self._batch is None else self._batch.nbytes

    def join(self, name: str, snapshot: bytes | None = None) -> None:
        """Add a source, which goes on from a snapshot if there is one.

        Raises:
            SnapshotError: It does not fit.
        """
        if self._batch is not None:
            self._batch.join(name, snapshot=snapshot)
        self._heads[name] = self.ready.head()

    def snapshot(self, name: str) -> bytes | None:
        """What the batch remembers of a source; None where a head remembers something, too."""
        if self._batch is None or self._heads[name].memory():
            return None
        return self._batch.snapshot(name)

    def leave(self, name: str) -> None:
        """Forget a source."""
        if self._batch is not None:
            self._batch.leave(name)
        del self._heads[name]

    def flush(self, name: str) -> None:
        """Compute everything of a source at its next step, and begin its clip anew."""
        if self._batch is not None:
            self._batch.flush(name)
        self._heads[name] = self.ready.head()

    def set_share(self, share: float | None) -> None:
        """Change the budget from the next step on."""
        policy = self._policy(share) if self._batch is not None else None
        if self._batch is not None and policy is not None:
            self._batch.policy = policy

    def close(self) -> None:
        """Give the memory back."""
        if self._batch is not None:
            self._batch.close()

    def step(self, prepared: Mapping[str, Prepared]) -> dict[str, Result]:
        """Step some sources in one pass, and read what the model says of each."""
        names = [name for name in self._heads if name in prepared]  # as they joined: no copies
        rows = [prepared[name] for name in names]
        args = joined([row.args for row in rows])
        output, ms = self._timed(args, names)
        share = ms / len(names)
        record = None if self._batch is None else self._batch.last
        predictions = [
            self.ready.read(self._heads[name](part), row)
            for name, part, row in zip(names, parts(output, len(names)), rows, strict=True)
        ]
        if record is None:
            self.dense_ms = share
            numbers = StepNumbers(share, *self._dense_cost())
            return {
                name: Result(prediction, numbers)
                for name, prediction in zip(names, predictions, strict=True)
            }
        costs = numbers_of(record, share)
        return {
            name: Result(predictions[i], costs[i], *maps_of(record, i, rows[i]))
            for i, name in enumerate(names)
        }

    def measure_dense(self, prepared: Sequence[Prepared]) -> None:
        """Time the whole model on frames that were just stepped."""
        args = joined([row.args for row in prepared])
        with torch.no_grad():
            stop = start_clock(args[0].device)
            getattr(self._whole, self.ready.method)(*args)
            self.dense_ms = stop()() / len(prepared)

    def _timed(self, args: tuple[Any, ...], names: list[str]) -> tuple[Any, float]:
        with torch.no_grad():
            stop = start_clock(args[0].device)
            if self._batch is None:
                output = getattr(self._whole, self.ready.method)(*args)
            else:
                output = self._batch.call(self.ready.method, *args, streams=names)
            return output, stop()()

    def _policy(self, share: float | None) -> Policy | None:
        if share is None and self._own is not None:
            return self._own
        return TopFraction(SHARE if share is None else share)

    def _dense_cost(self) -> tuple[int, float, float, float]:
        """Tokens and operations as `StepNumbers` takes them, of a step that computes everything."""
        if self._cost is None:
            self._cost = dense_cost(self.ready.model, self.ready.size)
        tokens, operations = self._cost
        return tokens, float(tokens), float(operations), float(operations)


def joined(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The arguments of several frames as those of one batch."""

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return values[0] if len(values) == 1 else torch.cat(list(values))
        if isinstance(values[0], list):
            return [entry for value in values for entry in value]
        raise UnsupportedError(f"Frames with {type(values[0]).__name__} cannot be put in a batch.")

    return tuple(join(values) for values in zip(*rows, strict=True))


def parts(output: Any, count: int) -> list[Any]:
    """The output of a batch as one for each of its frames."""
    if isinstance(output, Tensor) and len(output) == count:
        return [output[i : i + 1] for i in range(count)]
    if isinstance(output, Mapping):
        found: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, value in output.items():
            if isinstance(value, Tensor) and value.dim() and len(value) == count:
                for i in range(count):
                    found[i][name] = value[i : i + 1]
        return found
    if isinstance(output, Sequence) and len(output) == count:
        return [[entry] for entry in output]
    raise UnsupportedError(
        f"The model returns a {type(output).__name__}, which cannot be divided by its frames."
    )


def numbers_of(record: StepRecord, ms: float) -> list[StepNumbers]:
    """What a step of a batch cost each of its streams."""
    streams = len(record.flushed)
    tokens = sum(layout.tokens for layout in record.layouts.values())
    block = sum(entry.shape.tokens for entry in record.blocks.values()) / max(len(record.blocks), 1)
    counts = torch.stack([gate.counts.float().cpu() for gate in record.gates.values()])
    shares = (counts.mean(dim=0) / max(block, 1)).tolist()
    dense = record.dense_macs / streams
    return [
        StepNumbers(ms, tokens, share * tokens, float(cost.total), dense, flushed)
        for share, cost, flushed in zip(shares, record.operations(), record.flushed, strict=True)
    ]


def maps_of(
    record: StepRecord, stream: int, prepared: Prepared
) -> tuple[Tensor | None, Tensor | None]:
    """Updated tokens and errors of one stream, without the padding of its frame."""
    layout = next(iter(record.layouts.values()))
    if record.mask is None:
        return None, None
    updated = grid_of_picture(record.mask[stream].cpu(), layout, prepared.frame).clone()
    if record.error is None or record.flushed[stream]:
        return updated, None
    errors = grid_of_picture(record.error[stream].float().cpu(), layout, prepared.frame)
    return updated, errors.nan_to_num(0.0)
