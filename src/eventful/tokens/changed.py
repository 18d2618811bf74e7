"""Image tokens that changed from frame to frame, for language models that are fed as they run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eventful.errors import ConfigError, FrameError


@dataclass(frozen=True, eq=False)
class TokenChange:
    """The tokens of a frame that changed.

    Attributes:
        places: (M,) their places among the tokens of the frame, ascending.
        vectors: (M, D) what they are now.
        tokens: N, changed or not.
    """

    places: Tensor
    vectors: Tensor
    tokens: int

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"TokenChange({len(self)} of {self.tokens} tokens)"


def changed_tokens(before: Tensor | None, after: Tensor, tolerance: float = 0.0) -> TokenChange:
    """Which tokens of a frame differ from those of another, and their vectors.

    Args:
        before: (N, D); None if all tokens count as changed.
        after: (N, D).
        tolerance: a token changed if its vector moved by more than this share of its length; with
            0 if any of its bits differ.
    """
    limit = _checked(tolerance)
    if after.dim() != 2 or (before is not None and before.shape != after.shape):
        shapes = [tuple(one.shape) for one in (before, after) if one is not None]
        raise FrameError(
            f"Tokens of one frame are a tensor (N, D), the same for both frames; got {shapes}. "
            "Compare the frames of a batch one by one."
        )
    if before is None:
        places = torch.arange(len(after), device=after.device)
    elif limit == 0:
        places = (before != after).any(dim=1).nonzero().flatten()
    else:
        old, new = before.float(), after.float()
        moved = torch.linalg.vector_norm(new - old, dim=1)
        # Not `moved > limit`: a vector that is not finite has changed.
        within = moved <= limit * torch.linalg.vector_norm(old, dim=1)
        places = (~within).nonzero().flatten()
    return TokenChange(places, after.index_select(0, places), len(after))


class ImageTokens:
    """The image tokens that a language model was given last, to give it only those that changed.

    Each token is compared with what it was when it was last given out, so that small changes are
    not lost: they add up until they exceed the tolerance.

    Args:
        tolerance: see `changed_tokens`.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        self.tolerance = _checked(tolerance)
        self._held: Tensor | None = None

    def __repr__(self) -> str:
        held = "none yet" if self._held is None else f"{len(self._held)} tokens"
        return f"ImageTokens(tolerance={self.tolerance}: {held})"

    @property
    def held(self) -> Tensor | None:
        """(N, D) the tokens as they were last given out; None before the first frame."""
        return None if self._held is None else self._held.clone()

    def update(self, features: Any) -> TokenChange:
        """Take the tokens of the next frame, and return those that changed.

        The first frame, and one with another number of tokens, returns all of them.

        Args:
            features: (N, D) or (1, N, D), a list with one such tensor, or what
                `get_image_features` of transformers returns for one frame.
        """
        now = _tokens_of(features)
        with torch.no_grad():
            known = self._held
            if known is None or known.shape != now.shape or known.device != now.device:
                known = None
            change = changed_tokens(known, now, self.tolerance)
            # Out of place: a reader may have the old tensor.
            self._held = (
                now.clone()
                if known is None
                else known.index_copy(0, change.places, change.vectors.to(known.dtype))
            )
        return change

    def reset(self) -> None:
        """Forget everything, e.g. for another conversation: the next frame returns all tokens."""
        self._held = None


def _tokens_of(features: Any) -> Tensor:
    """The tokens (N, D) of one frame."""
    found = getattr(features, "pooler_output", features)
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, Tensor) and found.dim() == 3 and len(found) == 1:
        found = found[0]
    if not isinstance(found, Tensor) or found.dim() != 2:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise FrameError(
            f"Image tokens of one frame are a tensor (N, D), got {shape}. Have one ImageTokens for "
            "each stream, and pass it the tokens of that stream's frame."
        )
    return found.detach()


def _checked(tolerance: float) -> float:
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not number or not math.isfinite(tolerance) or tolerance < 0:
        raise ConfigError(f"tolerance is a share of 0 or more, got {tolerance!r}; e.g. 0.01.")
    return float(tolerance)
