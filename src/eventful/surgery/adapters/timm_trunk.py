"""What timm's plain vision transformers share: a list of blocks, a patch grid, intermediates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from eventful.errors import UnsupportedError
from eventful.surgery.adapter import Adapter
from eventful.surgery.adapters.constants import ResizingMethod, SizedMethod, is_own
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout


class TimmTrunk(Adapter):
    """A timm model with `blocks`, a `patch_embed` and `forward_intermediates`.

    Attributes:
        resizing: methods that resize the position embedding, with the function they do it by.
    """

    library = "timm"
    resizing: ClassVar[Mapping[str, str]] = {"_pos_embed": "resample_abs_pos_embed"}

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
        made: dict[str, Any] = {
            method: ResizingMethod(trunk, method, function, session)
            for method, function in self.resizing.items()
            if is_own(trunk, method, self.library)
        }
        rope: Any = getattr(trunk, "rope", None)
        if is_own(rope, "get_embed", self.library):
            made["rope.get_embed"] = SizedMethod(rope, "get_embed", session)
        run = made.get("forward_intermediates")
        made["forward_intermediates"] = TappedIntermediates(trunk, name, session, run)
        return made


@dataclass
class TappedIntermediates:
    """timm's `forward_intermediates`, announcing which blocks' outputs it will hand out.

    Attributes:
        run: what to call in a stream; timm's own if left out.
    """

    trunk: Any
    name: str
    session: Session
    run: Callable[..., Any] | None = None

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
        if self.run is not None:
            return self.run(*call.args[1:], **call.kwargs)
        return original(*call.args, **call.kwargs)
