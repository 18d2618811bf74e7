"""timm's Eva and others of its blocks: eva*, *_dinov3*, *_rope_*, qwen3_vit_*, deepseek_vit_*."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.cost.counting import LinearCost
from eventful.rules.spec import BlockSpec, QKVMap, TokenMap, linear_cost
from eventful.surgery.adapter import BlockCall, Foreign, is_class, repeat_heads
from eventful.surgery.adapters.origin import forward_of, known_attention
from eventful.surgery.adapters.timm_trunk import TimmTrunk, timm_spec
from eventful.surgery.adapters.versions import normed, rotation, separate_bias

_PATH = "timm.models.eva"
_BLOCKS = (
    f"{_PATH}.EvaBlock",
    f"{_PATH}.EvaBlockPostNorm",
    "timm.models.deepseek_vit.DeepseekVitBlock",
)
_ATTENTION = (f"{_PATH}.EvaAttention", "timm.layers.attention.AttentionRope")


class TimmEva(TimmTrunk):
    """Global attention with rotary position, with or without absolute position."""

    name = "timm Eva, Qwen3Vit"

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        if is_class(module, "timm.models.qwen3_vit", "Qwen3VitEncoder"):
            return True
        return is_class(module, _PATH, "Eva") and module.pos_embed is not None

    def spec(self, trunk: nn.Module, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        attention = known_attention(block, _BLOCKS, _ATTENTION)

        def project(o: Tensor) -> Tensor:
            return attention.proj(attention.norm(o))

        before: tuple[TokenMap, TokenMap] = (block.norm1, block.norm2)
        after: tuple[TokenMap, TokenMap] = (nn.Identity(), nn.Identity())
        if forward_of(block) == f"{_PATH}.EvaBlockPostNorm":
            before, after = after, before
        else:
            gammas = [getattr(block, name, None) for name in ("gamma_1", "gamma_2")]
            after = (lambda x: scaled(gammas[0], x), lambda x: scaled(gammas[1], x))
        return replace(
            timm_spec(block, attention),
            norm1=before[0],
            qkv=lambda x, index, rope: _qkv(attention, x, index, rope),
            project=lambda o: after[0](project(o)),
            norm2=before[1],
            mlp=lambda y: after[1](block.mlp(y)),
            qkv_cost=qkv_cost(attention),
        )

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`; the positions are the rotary table of all patches."""
        call = super().read(spec, args, kwargs)
        call.positions = args[1] if len(args) > 1 else kwargs.get("rope")
        return call


class TimmEvaRotary(TimmEva):
    """Models with rotary position only, such as DINOv3."""

    name = "timm Eva without position embedding, DeepseekVit"
    adds_positions = False

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        if is_class(module, "timm.models.deepseek_vit", "DeepseekVitEncoder"):
            return True
        return is_class(module, _PATH, "Eva") and module.pos_embed is None


def scaled(gamma: Tensor | None, x: Tensor) -> Tensor:
    """Tokens times a layer scale, if there is one."""
    return x if gamma is None else gamma * x


def _qkv(
    attention: Foreign, x: Tensor, index: Tensor, rope: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    heads = attention.num_heads
    key_heads = getattr(attention, "num_kv_heads", heads)
    q, k, v = _project(attention, x)
    q = normed(attention, "q_norm", q.unflatten(-1, (heads, -1)))
    k = normed(attention, "k_norm", k.unflatten(-1, (key_heads, -1)))
    if rope is not None:
        q, k = (part.type_as(v) for part in _rotate(attention, (q, k), index, rope))
    k = k.flatten(2)
    if key_heads < heads:  # grouped queries: each key head serves several query heads
        k, v = (repeat_heads(part, heads, q.shape[-1]) for part in (k, v))
    return q.flatten(2), k, v


def _project(attention: Foreign, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if attention.qkv is None:
        return attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    if getattr(attention, "q_bias", None) is None:
        packed = attention.qkv(x)
    else:
        bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
        if separate_bias(attention):
            packed = attention.qkv(x) + bias
        else:
            packed = F.linear(x, attention.qkv.weight, bias)
    q, k, v = packed.chunk(3, dim=-1)
    return q, k, v


def joined_bias_qkv(attention: Foreign) -> QKVMap:
    """The QKV map of an attention that keeps the biases of q, k and v apart."""
    return lambda x, index, positions: _project(attention, x)


def qkv_cost(attention: Foreign) -> LinearCost:
    """Cost per token of the layers of q, k and v."""
    if attention.qkv is None:
        return linear_cost(attention.q_proj, attention.k_proj, attention.v_proj)
    cost = linear_cost(attention.qkv)
    if getattr(attention, "q_bias", None) is None:
        return cost
    return cost + LinearCost(0, attention.qkv.out_features)


def _rotate(
    attention: Foreign, parts: tuple[Tensor, ...], index: Tensor, rope: Tensor
) -> tuple[Tensor, ...]:
    """Rotate (B, M, H, d) by the rows of the tokens at `index`; special tokens stay as they are.

    Args:
        rope: sine and cosine of every patch, (N, 2d), or (H, N, 2d) where heads differ, or
            (B, H or 1, N, 2d) where streams do.
    """
    from timm.layers import apply_rot_embed_cat

    prefix, half = attention.num_prefix_tokens, getattr(attention, "rotate_half", False)
    patch = (index - prefix).clamp_min(0)
    if rope.dim() == 2:
        rows = rope[patch][:, :, None]  # (B, M, 1, 2d)
    elif rope.dim() == 3:
        rows = rope.transpose(0, 1)[patch]  # (B, M, H, 2d)
    else:
        stream = torch.arange(len(index), device=index.device)[:, None]
        rows = rope.transpose(1, 2).expand(len(index), -1, -1, -1)[stream, patch]
    rotated = (apply_rot_embed_cat(part, rows, **rotation(half)) for part in parts)
    if not prefix:
        return tuple(rotated)
    special = (index < prefix)[:, :, None, None]
    return tuple(torch.where(special, a, b) for a, b in zip(parts, rotated, strict=True))
