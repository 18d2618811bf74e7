"""What the adapters for timm share: a list of blocks, a patch grid, intermediates, block specs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.errors import UnsupportedError
from eventful.rules.spec import BlockSpec, QKVMap
from eventful.surgery.adapter import Adapter, Foreign, Method, per_head, usual_spec
from eventful.surgery.adapters.constants import ResizingMethod, SizedMethod, is_own
from eventful.surgery.adapters.versions import head_dim
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout


class TimmTrunk(Adapter):
    """A timm model with `blocks`, a `patch_embed` and `forward_intermediates`.

    Attributes:
        resizing: methods that resize the position embedding, with the function they call for it.
    """

    library = "timm"
    resizing: ClassVar[Mapping[str, str]] = {"_pos_embed": "resample_abs_pos_embed"}

    def blocks(self, trunk: Foreign) -> Sequence[tuple[str, nn.Module]]:
        """See `Adapter`."""
        return [(f"blocks.{name}", block) for name, block in trunk.blocks.named_children()]

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        height, width = trunk.patch_embed.dynamic_feat_size(size)
        return TokenLayout((height, width), getattr(trunk, "num_prefix_tokens", 0))

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        pretrained = (getattr(trunk, "pretrained_cfg", None) or {}).get("input_size", ())[-2:]
        size = trunk.patch_embed.img_size or pretrained
        if not size:
            return super().default_size(trunk)
        return int(size[0]), int(size[1])

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        made: dict[str, Method] = {
            method: ResizingMethod(trunk, method, function, session)
            for method, function in self.resizing.items()
            if is_own(trunk, method, self.library)
        }
        rope: Foreign = getattr(trunk, "rope", None)
        if is_own(rope, "get_embed", self.library):
            made["rope.get_embed"] = SizedMethod(rope, "get_embed", session)
        run = made.get("forward_intermediates")
        made["forward_intermediates"] = TappedIntermediates(trunk, name, session, run)
        return made


@dataclass
class TappedIntermediates:
    """timm's `forward_intermediates`, which first notes the blocks whose outputs it will return.

    Attributes:
        run: what to call in a stream; timm's own method if left out.
    """

    trunk: Foreign
    name: str
    session: Session
    run: Method | None = None

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
            # A block that skips a frame would miss what changed in it, so all blocks run. The
            # intermediates are the same.
            if not call.arguments["intermediates_only"]:
                raise UnsupportedError(
                    "stop_early=True inside a stream needs intermediates_only=True, because every "
                    "block has to run on every frame. To drop the blocks after the last index, "
                    "build the model with features_only=True or call prune_intermediate_layers."
                )
            call.arguments["stop_early"] = False
        if self.run is not None:
            return self.run(*call.args[1:], **call.kwargs)
        return original(*call.args, **call.kwargs)


def timm_spec(block: Foreign, attention: Foreign) -> BlockSpec:
    """A timm block as most are: norm, attention, norm, MLP; families replace what differs."""
    heads, width = attention.num_heads, head_dim(attention)
    return usual_spec(block, attention, heads, width, _normed_qkv(attention))


def _normed_qkv(attention: Foreign) -> QKVMap:
    """The QKV map of an attention with one layer for q, k and v, and norms for q and k."""
    heads = attention.num_heads

    def qkv(x: Tensor, index: Tensor, positions: object) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = attention.qkv(x).chunk(3, dim=-1)
        return per_head(attention.q_norm, q, heads), per_head(attention.k_norm, k, heads), v

    return qkv
