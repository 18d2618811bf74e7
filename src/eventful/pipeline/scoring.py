"""How right predictions are, where the truth of a source is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from eventful import files
from eventful.models.vitdet.frames import Detections
from eventful.paper.data.records import Box
from eventful.paper.evaluate.detection import FrameLog, found_in, truth_in
from eventful.paper.evaluate.metrics import fgfa_map50
from eventful.pipeline.folder import read_state
from eventful.pipeline.predictions import Prediction
from eventful.pipeline.sources import Footage, Taken

Sides = tuple[str, ...]


class Scores:
    """Collects predictions beside the truth: of detections, and of what a video shows.

    Args:
        classes: names of the model's labels. A source is scored if its own are the same.
        sides: `eventful` and `dense`, or one of them.
    """

    def __init__(self, classes: Sequence[str], sides: Sides) -> None:
        self._classes, self.sides = tuple(classes), sides
        self._logs: dict[str, dict[str, FrameLog]] = {}
        self._right: dict[str, dict[str, list[int]]] = {}  # by source and side: right ones, all

    def fits(self, footage: Footage) -> bool:
        """Whether predictions for a source can be scored."""
        return bool(footage.classes) and footage.classes == self._classes

    def add(
        self, source: str, footage: Footage, taken: Taken, predictions: Sequence[Prediction]
    ) -> None:
        """Note the predictions of one frame, one for each side, with all their detections."""
        if not self.fits(footage):
            return
        for side, prediction in zip(self.sides, predictions, strict=True):
            if prediction.detections is not None and taken.truth is not None:
                log = self._logs.setdefault(source, {}).setdefault(side, FrameLog())
                log.add(prediction.detections, taken.truth, 0)
            elif prediction.probabilities is not None and len(prediction.probabilities):
                count = self._right.setdefault(source, {}).setdefault(side, [0, 0])
                count[0] += int(prediction.probabilities.argmax()) == footage.action
                count[1] += footage.action is not None

    def accuracy(self) -> dict[str, dict[str, float]]:
        """Scores by name and side, from 0 to 1; empty without truth."""
        made: dict[str, dict[str, float]] = {}
        for side in self.sides:
            logs = [log for each in self._logs.values() if (log := each.get(side)) is not None]
            found: list[Detections] = [frame for log in logs for frame in log.found]
            truth: list[Sequence[Box]] = [boxes for log in logs for boxes in log.truth]
            value = fgfa_map50(found, truth, self._classes).value if found else math.nan
            if not math.isnan(value):
                made.setdefault("mAP50", {})[side] = value
            right, count = self._counted(side)
            if count:
                made.setdefault("top1", {})[side] = right / count
        return made

    @property
    def frames(self) -> int:
        """Frames that the scores are of."""
        logs = [len(next(iter(each.values()))) for each in self._logs.values()]
        return sum(logs) + self._counted(self.sides[0])[1]

    def _counted(self, side: str) -> tuple[int, int]:
        """Labels that are right, and all."""
        numbers = [each.get(side, (0, 0)) for each in self._right.values()]
        return sum(right for right, _ in numbers), sum(count for _, count in numbers)

    def save(self, source: str, path: Path) -> None:
        """Write what is known of a source, so that a resumed run can go on with it."""
        tensors: dict[str, Tensor] = {}
        for side, log in self._logs.get(source, {}).items():
            tensors |= {f"{side}/{name}": value for name, value in log.tensors().items()}
        for side, numbers in self._right.get(source, {}).items():
            tensors[f"{side}/right"] = torch.tensor(numbers)
        if tensors:
            from safetensors.torch import save

            files.write_bytes(path, save({k: v.contiguous() for k, v in tensors.items()}))

    def restore(self, source: str, path: Path) -> None:
        """Go on with what `save` wrote.

        Raises:
            SnapshotError: The file is damaged.
        """
        tensors = read_state(path)
        for side in self.sides:
            own = _of(tensors, side)
            if "right" in own:
                self._right.setdefault(source, {})[side] = own.pop("right").tolist()
            if own:
                log = FrameLog()
                for found, truth in zip(found_in(own), truth_in(own), strict=True):
                    log.add(found, truth, 0)
                self._logs.setdefault(source, {})[side] = log


def _of(tensors: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
    prefix = f"{side}/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
