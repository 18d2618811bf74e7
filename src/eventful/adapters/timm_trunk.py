"""What timm's plain vision transformers share: a list of blocks, a patch grid, intermediates."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from eventful.adapters.base import Adapter, Session
from eventful.errors import UnsupportedError
from eventful.layout import TokenLayout


class TimmTrunk(Adapter):
    """A timm model with `blocks`, a `patch_embed` and `forward_intermediates`."""

    library = "timm"

    def blocks(self, trunk: Any) -> Sequence[tuple[str, nn.Module]]:
        """See `Adapter`."""
        return [(f"blocks.{name}", block) for name, block in trunk.blocks.named_children()]

    def layout(self, trunk: Any, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        height, width = trunk.patch_embed.dynamic_feat_size(size)
        return TokenLayout((height, width), getattr(trunk, "num_prefix_tokens", 0))

    def default_size(self, trunk: Any) -> tuple[int, int]:
        """See `Adapter`."""
        recorded = (getattr(trunk, "pretrained_cfg", None) or {}).get("input_size", ())[-2:]
        size = trunk.patch_embed.img_size or recorded
        if not size:
            return super().default_size(trunk)
        return int(size[0]), int(size[1])

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Any]:
        """See `Adapter`."""
        return {"forward_intermediates": TappedIntermediates(trunk, name, session)}


@dataclass
class TappedIntermediates:
    """timm's `forward_intermediates`, announcing which blocks' outputs it will hand out."""

    trunk: Any
    name: str
    session: Session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original with the same arguments."""
        original = type(self.trunk).forward_intermediates
        step = self.session.step
        if step is None:
            return original(self.trunk, *args, **kwargs)
        from timm.models._features import feature_take_indices

        call = inspect.signature(original).bind(self.trunk, *args, **kwargs)
        call.apply_defaults()
        depth = len(self.trunk.blocks)
        taken, deepest = feature_take_indices(depth, call.arguments["indices"])
        step.taps.setdefault(self.name, set()).update(taken)
        if call.arguments["stop_early"] and deepest + 1 < depth:
            # A block that sits a frame out would miss what changed in it, so all of them run;
            # the intermediates are the same.
            if not call.arguments["intermediates_only"]:
                raise UnsupportedError(
                    "stop_early=True inside a stream needs intermediates_only=True, because every "
                    "block has to see every frame. To save the blocks behind the last index, build "
                    "the model with features_only=True or call prune_intermediate_layers."
                )
            call.arguments["stop_early"] = False
        return original(*call.args, **call.kwargs)
