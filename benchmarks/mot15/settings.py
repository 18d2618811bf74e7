"""Options of a run, its time limit, and where its files may be."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eventful import files
from eventful.config import PRESETS, Context
from eventful.policies import NoiseThreshold

ROOT = Path(__file__).resolve().parent.parent.parent
BACKBONE = "vit_small_patch14_dinov2"
PATCH = 14
SHARES = (0.03, 0.06, 0.12, 0.25)
# Variants of `fast`, by the options of its config.
VARIANTS: dict[str, dict[str, Any]] = {
    "fast-former": {
        "policy": NoiseThreshold(),
        "context": None,
        "motion": False,
        "max_age": 64,
    },
    "fast-plain": {"context": None, "motion": False},
    "fast-context": {"context": Context(), "motion": False},
    "fast-motion": {"context": None, "motion": True},
    "fast-both": {"context": Context(), "motion": True},
}


@dataclass(frozen=True)
class Options:
    """Options that change the numbers of a run.

    Attributes:
        variants: of `fast`, by name.
        carried: measure frame skipping with tokens that move with the picture, too.
    """

    width: int = 644
    steps: int = 4000
    batch: int = 16
    views: int = 6
    lr: float = 1e-3
    train_frames: int | None = None
    val_frames: int | None = None
    sequences: tuple[str, ...] = ()
    shares: tuple[float, ...] = SHARES
    presets: tuple[str, ...] = PRESETS
    variants: tuple[str, ...] = ()
    carried: bool = True
    seed: int = 0


QUICK = {"width": 210, "steps": 20, "batch": 4, "views": 1, "train_frames": 4, "val_frames": 4}


class Clock:
    """The time a run may take."""

    def __init__(self, minutes: float) -> None:
        self.began, self.seconds = time.monotonic(), 60 * minutes

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the time has passed."""
        return self.spent > share * self.seconds


def say(clock: Clock, text: str) -> None:
    print(f"[{clock.spent:6.1f} s] {text}", flush=True)


def refuse_tracked(out: Path) -> None:
    """Weights trained on MOT15 are not to be shipped, so they must not be in a tracked folder."""
    inside = out.resolve()
    if not inside.is_relative_to(ROOT):
        return
    rules = (ROOT / ".gitignore").read_text().split()
    ignored = [ROOT / rule.strip("/") for rule in rules if "*" not in rule and rule.startswith("/")]
    if not any(inside.is_relative_to(folder) for folder in ignored):
        raise SystemExit(
            f"{out} is a tracked folder, and the head trained on MOT15 must stay out of the "
            f"repository. Use one outside, or below {', '.join(p.name for p in ignored)}."
        )


def fingerprint(options: Options, weights: Path, device: str, head: Path | None = None) -> str:
    """Digest of the options; a run with other options starts anew."""
    given = [asdict(options), weights.stat().st_size, weights.name, device]
    text = json.dumps(given if head is None else [*given, files.file_digest(head)])
    return files.digest([text])[:12]
