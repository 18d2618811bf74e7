"""What a simulation found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eventful.cluster.simulate.costs import Costs
from eventful.cluster.simulate.fleet import ASSUMPTIONS, Fleet

Array = np.ndarray
BIN_MS = 0.25
_BINS = 40_000  # 10 s; later frames count as that
CAUSES = ("worker", "machine", "registry", "no room", "in a step")


@dataclass
class Outcome:
    """Frames, times and events of a simulated cluster.

    Attributes:
        done: frames computed, by camera.
        dropped: frames replaced by newer ones, by camera.
        lost: frames without a live worker, by cause and camera.
        latency: frames by milliseconds from capture to result, in bins of `BIN_MS`.
        busy: milliseconds that each worker computed.
        alive: intervals in which each worker was up.
        recoveries: seconds that a stream had no live worker, one entry for each time.
        moves: streams handed on because a worker was full.
        flushes: frames in which all tokens were computed.
        events: number of failures by kind.
        minutes: by minute, what the picture shows: done, dropped, lost, busy share.
    """

    fleet: Fleet
    costs: Costs
    seed: int
    done: Array
    dropped: Array
    lost: Array
    latency: Array
    busy: Array
    alive: Array
    recoveries: list[float] = field(default_factory=list)
    moves: int = 0
    flushes: int = 0
    sent: int = 0
    events: dict[str, int] = field(default_factory=dict)
    minutes: Array = field(default_factory=lambda: np.zeros((4, 0)))

    @classmethod
    def empty(cls, fleet: Fleet, costs: Costs, seed: int) -> Outcome:
        """Before the first frame."""
        cameras = fleet.cameras
        minutes = int(np.ceil(fleet.ticks / fleet.in_ticks(60))) + 1
        return cls(
            fleet, costs, seed,
            done=np.zeros(cameras, np.int64),
            dropped=np.zeros(cameras, np.int64),
            lost=np.zeros((len(CAUSES), cameras), np.int64),
            latency=np.zeros(_BINS, np.int64),
            busy=np.zeros(fleet.gpus),
            alive=np.zeros(fleet.gpus, np.int64),
            minutes=np.zeros((4, minutes)),
        )  # fmt: skip

    def add_latencies(self, ms: Array) -> None:
        """Count frames by their latency."""
        bins = np.minimum((ms / BIN_MS).astype(np.int64), _BINS - 1)
        self.latency += np.bincount(bins, minlength=_BINS)

    def percentile(self, share: float) -> float:
        """Milliseconds that this share of the computed frames stays within."""
        total = int(self.latency.sum())
        if not total:
            return float("nan")
        return float((np.searchsorted(self.latency.cumsum(), share * total) + 1) * BIN_MS)

    @property
    def missing_share(self) -> float:
        """Frames that were dropped or lost, as a share of those sent."""
        return float(self.dropped.sum() + self.lost.sum()) / max(self.sent, 1)

    @property
    def utilisation(self) -> Array:
        """Share of its time that each worker computed while it was up."""
        up = np.maximum(self.alive, 1) * self.fleet.tick_ms
        return np.asarray(np.where(self.alive > 0, self.busy / up, 0.0))

    @property
    def dense_seconds(self) -> float:
        """GPU time of the dense model for the frames that were computed, in full steps."""
        most = self.fleet.most or self.costs.most
        each = self.costs.dense_fixed / most + self.costs.dense_per_stream
        return float(self.done.sum()) * each / 1000

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        used, recoveries = self.utilisation, np.asarray(self.recoveries or [0.0])
        missing = self.dropped + self.lost.sum(axis=0)
        worst = np.argsort(-missing, kind="stable")[:5]
        seconds = float(self.busy.sum()) / 1000
        return {
            "seed": self.seed,
            "fleet": self.fleet.to_dict(),
            "costs": {**vars(self.costs)},
            "assumptions": list(ASSUMPTIONS),
            "frames": {
                "sent": self.sent,
                "done": int(self.done.sum()),
                "dropped": int(self.dropped.sum()),
                "lost": dict(zip(CAUSES, self.lost.sum(axis=1).tolist(), strict=True)),
                "missing_share": self.missing_share,
                "worst_cameras": {f"camera-{i}": int(missing[i]) for i in worst if missing[i]},
            },
            "latency_ms": {f"p{n}": self.percentile(n / 100) for n in (50, 90, 99)},
            "utilisation": {"mean": float(used.mean()), "highest": float(used.max())},
            "recovery_s": {
                "times": len(self.recoveries),
                "mean": float(recoveries.mean()),
                "longest": float(recoveries.max()),
            },
            "events": self.events,
            "moves": self.moves,
            "flushes": self.flushes,
            "gpu_seconds": seconds,
            "dense_gpu_seconds": self.dense_seconds,
            "times_cheaper_than_dense": self.dense_seconds / seconds if seconds else None,
            "cores_to_decode": self.fleet.cameras * self.fleet.fps * self.fleet.decode / 1000,
        }
