"""Average precision and cost of runs: the rows of the result."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.mot15.clips import Clip
from benchmarks.mot15.contest import SKIPS, Run, Setting, equal_share, skipped
from benchmarks.mot15.predictions import Predictions
from benchmarks.mot15.settings import Clock, say
from eventful.paper.evaluate.metrics import COCO_LIBRARY, coco_map50

CLASSES = ("person",)


def can_score() -> bool:
    """Whether the library that computes average precision is installed."""
    return importlib.util.find_spec(COCO_LIBRARY) is not None


@dataclass(frozen=True)
class Score:
    """A setting on one sequence, or on all of them.

    Attributes:
        map50: COCO's average precision at IoU 0.5 over the frames.
        gmacs: operations a frame, the mean over all frames, the first one included.
        cost: the same as a share of dense.
        updated: share of tokens updated, the mean over gates and frames.
        flushes: frames on which everything was recomputed.
    """

    sequence: str
    frames: int
    map50: float
    gmacs: float
    cost: float
    updated: float
    flushes: int


def score(runs: Sequence[Run], dense: Sequence[Run], clips: Sequence[Clip], name: str) -> Score:
    found = [d for run in runs for d in run.found]
    truth = [boxes for clip in clips for boxes in clip.truth]
    macs = sum(sum(run.macs) for run in runs)
    return Score(
        sequence=name,
        frames=len(found),
        map50=coco_map50(found, truth, CLASSES).value,
        gmacs=macs / len(found) / 1e9,
        cost=macs / sum(sum(run.macs) for run in dense),
        updated=sum(sum(r.updated) for r in runs) / sum(sum(r.updated) for r in dense),
        flushes=sum(sum(run.flushed) for run in runs),
    )


def scores(runs: Sequence[Run], dense: Sequence[Run], clips: Sequence[Clip]) -> list[dict]:
    """Over all sequences, then one by one."""
    made = [score(runs, dense, clips, "all")]
    made += [score([r], [d], [c], c.name) for r, d, c in zip(runs, dense, clips, strict=True)]
    return [asdict(s) for s in made]


def rows_of(made: Predictions, clips: Sequence[Clip], clock: Clock) -> list[dict[str, Any]]:
    """Rows of the result: dense, frame skipping, then every setting."""
    dense = made.dense
    rows = [{"preset": "dense", "policy": "", "share": 1.0, "scores": scores(dense, dense, clips)}]
    for every in SKIPS:
        plain = [skipped(run, 1 / every) for run in dense]
        for preset, runs in (("skip", plain), ("skip-carried", made.carried.get(every))):
            if runs is not None:
                row = {"preset": preset, "policy": f"every {every}", "share": 1 / every}
                rows.append({**row, "scores": scores(runs, dense, clips)})
    for setting, runs in made.settings.items():
        rows.append(_compared(setting, runs, made, clips, clock))
    return rows


def _compared(
    setting: Setting, runs: Sequence[Run], made: Predictions, clips: Sequence[Clip], clock: Clock
) -> dict[str, Any]:
    """The row of a setting, with the scores of frame skipping at its cost."""
    dense = made.dense
    equal = [skipped(d, equal_share(r, d)) for r, d in zip(runs, dense, strict=True)]
    own, skip = scores(runs, dense, clips), scores(equal, dense, clips)
    row = {**asdict(setting), "scores": own, "skip": skip}
    text = (
        f"{setting.preset:12} {setting.policy:8} mAP50 {own[0]['map50']:.3f} at "
        f"{own[0]['cost']:.1%} of the operations, skipping {skip[0]['map50']:.3f}"
    )
    if setting in made.carried:
        row["skip_carried"] = scores(made.carried[setting], dense, clips)
        text += f", carried {row['skip_carried'][0]['map50']:.3f}"
    say(clock, text)
    return row
