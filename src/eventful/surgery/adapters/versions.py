"""What differs between versions of the model libraries, in one place.

`docs/versions.md` says which versions were tried. A difference that a name alone makes is handled
where the name is looked up (`find` of `hf_base` takes several).
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from eventful.errors import UnsupportedError
from eventful.surgery.adapter import Foreign

# Older ones convert, and hand out hidden states of the updated tokens alone.
_OLDEST_TRANSFORMERS = (5, 4)


def head_dim(attention: Foreign) -> int:
    """Width of a head; Eva's attention has no `head_dim` up to timm 1.0.20."""
    width = getattr(attention, "head_dim", None)
    if width is None:
        width = attention.proj.in_features // attention.num_heads
    return int(width)


def normed(attention: Foreign, norm: str, part: Tensor) -> Tensor:
    """Queries or keys after their norm; Eva's attention has none up to timm 1.0.9."""
    made: Any = getattr(attention, norm, None)
    return part if made is None else made(part)


def separate_bias(attention: Foreign) -> bool:
    """Whether the bias of queries and values is added on its own; not up to timm 1.0.9."""
    return bool(getattr(attention, "qkv_bias_separate", False))


def rotation(half: bool) -> dict[str, bool]:
    """Options of timm's `apply_rot_embed_cat`, which knows no `half` in timm 1.0.15."""
    return {"half": True} if half else {}


def sam3_rotary(block: Foreign, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (S, d) of SAM 3's positions; in transformers 5.4 they are stored tables."""
    places = getattr(block, "position_ids", None)
    if places is None:
        cos, sin = block.rotary_emb()
        return cos, sin
    cos, sin = block.rotary_emb(tokens, places)
    return cos[0], sin[0]


def refuse_old_transformers() -> None:
    """Raise for a transformers whose hidden states would be wrong in a stream."""
    version = str(getattr(sys.modules.get("transformers"), "__version__", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < _OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, _OLDEST_TRANSFORMERS))
        raise UnsupportedError(
            f"transformers {version} is older than {oldest}: a stream would get hidden states of "
            f'some tokens alone. Update it: pip install "transformers>={oldest}".'
        )
