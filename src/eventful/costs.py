"""When dense is cheaper: times of steps as they were seen, and the break-even between them.

An eventful step costs less than a dense one up to some number of updated tokens. Where that
lies depends on the model, the machine and the batch, so it is measured on the steps a stream
runs anyway, and kept on disk for the next process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.adapters.base import Session

VARIABLE, CACHE = "EVENTFUL_FALLBACK", "EVENTFUL_CACHE"
_KEPT = 7  # samples of each kind
_BINS = 32  # classes of the share of tokens
_ENOUGH = 3  # samples before a class is believed
_SAVE_EVERY = 256


def enabled() -> bool:
    """Whether streams may fall back on dense steps: not if EVENTFUL_FALLBACK is 0."""
    return os.environ.get(VARIABLE, "1") not in ("0", "false", "no")


def cache_path() -> Path:
    """The file that keeps the measurements; EVENTFUL_CACHE names another folder."""
    folder = os.environ.get(CACHE) or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "eventful"
    )
    return Path(folder) / "costs.json"


def cost_key(session: Session, frame: Tensor, batch: int, tokens: int) -> str:
    """What a measurement holds for: model, rule, machine, dtype, batch and number of tokens."""
    digest = hashlib.sha256()
    for name, (trunk, _) in sorted(session.trunks.items()):
        digest.update(f"{name}:{type(trunk).__name__}".encode())
        for key, parameter in trunk.named_parameters():
            digest.update(f"{key}:{tuple(parameter.shape)}:{parameter.dtype}".encode())
    config = session.config
    if frame.is_cuda:
        machine = torch.cuda.get_device_name(frame.device)
    else:
        machine = f"{platform.processor() or platform.machine()} x{torch.get_num_threads()}"
    rule = f"{config.gating}/{config.attention}/{config.windows}/{config.pool}"
    version = torch.__version__
    parts = (
        digest.hexdigest()[:16],
        rule,
        machine,
        version,
        frame.dtype,
        f"B{batch}",
        f"N{tokens}",
    )
    return " | ".join(str(part).removeprefix("torch.") for part in parts)


class Costs:
    """Times of dense and of eventful steps of one kind.

    Args:
        key: see `cost_key`.
        tokens: N.
    """

    def __init__(self, key: str, tokens: int, path: Path | None = None) -> None:
        self._key, self._tokens = key, tokens
        self._path = path or cache_path()
        self._dense: list[float] = []
        self._steps: dict[int, list[float]] = {}
        self._pending: list[tuple[int, Callable[[], float]]] = []
        self._noted = 0
        self._most: int | None = None
        self._read()

    @property
    def wants_dense(self) -> bool:
        """Whether eventful steps were timed and dense ones were not: one should be run."""
        return not self._dense and any(len(times) >= _ENOUGH for times in self._steps.values())

    @property
    def most(self) -> int:
        """The number of updated tokens up to which an eventful step is worth it."""
        if self.wants_dense:
            return 0
        if self._most is None:
            self._most = self._break_even()
        return self._most

    def _break_even(self) -> int:
        tokens = self._tokens
        known = {
            share * tokens / _BINS: statistics.median(times)
            for share, times in sorted(self._steps.items())
            if len(times) >= _ENOUGH
        }
        if not self._dense or not known:
            return tokens // 2
        dense = statistics.median(self._dense)
        good = [(width, ms) for width, ms in known.items() if ms <= dense]
        bad = [
            width for width, ms in known.items() if ms > dense and (not good or width > good[-1][0])
        ]
        # The last class that paid stands for its whole bin; beyond it, time grows as tokens do.
        limit = good[-1][0] * dense / good[-1][1] if good else 0.0
        if bad:
            limit = min(limit, bad[0] - tokens / _BINS / 2) if good else bad[0] - tokens / _BINS
        return max(0, min(tokens, int(limit)))

    def note(self, updated: int, ms: float, *, dense: bool) -> None:
        """Take in the time of one step that updated so many tokens, or ran dense."""
        share = max(1, round(updated * _BINS / self._tokens))
        kept = self._dense if dense else self._steps.setdefault(share, [])
        kept.append(ms)
        del kept[:-_KEPT]
        if len(kept) < _KEPT or self._noted % _KEPT == 0:
            self._most = None
        self._noted += 1
        if self._noted in (8, 32) or self._noted % _SAVE_EVERY == 0:
            self.save()

    def note_later(self, updated: int, clock: Callable[[], float], *, dense: bool) -> None:
        """The same for a step still in flight; read when two more have been queued."""
        self._pending.append((-1 if dense else updated, clock))
        while len(self._pending) > 2:
            tokens, read = self._pending.pop(0)
            self.note(abs(tokens), read(), dense=tokens < 0)

    def save(self) -> None:
        """Write what is known; a cache that cannot be written is done without."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            known = _load(self._path)
            steps = {str(share): times for share, times in sorted(self._steps.items())}
            known[self._key] = {"dense": self._dense, "steps": steps}
            beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            beside.write_text(json.dumps(known, indent=1))
            beside.replace(self._path)

    def _read(self) -> None:
        entry = _load(self._path).get(self._key, {})
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            self._dense = [float(ms) for ms in entry.get("dense", [])]
            self._steps = {
                int(share): [float(ms) for ms in times]
                for share, times in entry.get("steps", {}).items()
            }


def _load(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def start_clock(device: torch.device) -> Callable[[], Callable[[], float]]:
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
