"""Comparisons of a stream's outputs with those of the dense model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Audit:
    """One comparison.

    Attributes:
        step: of the stream, the first is 0.
        error: |output - dense| / |dense|, of the worst stream.
        cosine: of a token's output with the dense one, the median over tokens.
        worst_cosine: of the worst token.
        ms: what the comparison took.
        recomputed: the stream went on from the dense output.
    """

    step: int
    error: float
    cosine: float
    worst_cosine: float
    ms: float
    recomputed: bool = False

    @classmethod
    def of(cls, step: int, values: list[float], ms: float, *, recomputed: bool = False) -> Audit:
        """From the values of `compare`."""
        error, cosine, worst = values
        return cls(step, error, cosine, worst, ms, recomputed)


def comparable(output: Any, dense: Any, streams: int) -> list[tuple[Tensor, Tensor]]:
    """Tensors of floating-point numbers in both, of one shape, with a row per stream.

    A tensor of two dimensions counts only where it is all there is: else it may hold boxes.
    """
    least = 2 if isinstance(output, Tensor) else 3
    first, second = pytree.tree_leaves(output), pytree.tree_leaves(dense)
    if len(first) != len(second):
        return []
    pairs = zip(first, second, strict=True)
    return [
        (a, b)
        for a, b in pairs
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point()
        and a.shape == b.shape and a.dim() >= least and len(a) == streams and a.numel()
    ]  # fmt: skip


def compare(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """(3,) error of the worst stream, median and worst cosine of tokens, where the tensors are.

    Tokens are the rows (B, N, D) of a tensor, or the places of a map (B, D, h, w).
    """
    square = [_squares(a.float() - b.float()) for a, b in pairs]
    size = [_squares(b.float()) for _, b in pairs]
    error = (sum(square) / sum(size).clamp_min(1e-12)).sqrt().max()  # type: ignore[union-attr]
    cosine = torch.cat(
        [F.cosine_similarity(_tokens(a), _tokens(b), dim=-1).flatten() for a, b in pairs]
    )
    return torch.stack([error, cosine.median(), cosine.min()])


def _squares(values: Tensor) -> Tensor:
    return values.flatten(1).square().sum(dim=1)


def _tokens(values: Tensor) -> Tensor:
    return (values.movedim(1, -1) if values.dim() == 4 else values).float()


@dataclass
class AuditLog:
    """The comparisons of a stream; numbers of a device are read when somebody asks."""

    kept: int = 1024
    count: int = 0
    total_ms: float = 0.0
    _made: list[Audit] = field(default_factory=list)
    _waiting: list[Callable[[], Audit]] = field(default_factory=list)

    def add(self, read: Callable[[], Audit]) -> None:
        """Note a comparison."""
        self._waiting.append(read)
        if len(self._waiting) > 64:
            self._read()

    def _read(self) -> None:
        for read in self._waiting:
            made = read()
            if not math.isfinite(made.error):  # of a frame that was bad
                continue
            self.count += 1
            self.total_ms += made.ms
            self._made.append(made)
        self._waiting.clear()
        del self._made[: -self.kept]

    @property
    def audits(self) -> tuple[Audit, ...]:
        """The last ones, oldest first."""
        self._read()
        return tuple(self._made)

    def totals(self) -> dict[str, Any]:
        """What a summary shows; nothing where nothing was compared."""
        every = self.audits
        if not every:
            return {}
        # Where the stream went on from the dense output, the error is not that of what it returned.
        made = [audit for audit in every if not audit.recomputed] or every
        return {
            "audits": self.count,
            "audit_error": median(audit.error for audit in made),
            "worst_audit_error": max(audit.error for audit in made),
            "audit_cosine": median(audit.cosine for audit in made),
            "worst_audit_cosine": min(audit.worst_cosine for audit in made),
            "audit_ms": self.total_ms,
        }
