"""timm's parallel blocks and differential attention, as one attention and one MLP each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.cost.counting import LinearCost
from eventful.rules.spec import BlockSpec, QKVMap, TokenMap, linear_cost
from eventful.surgery.adapter import Foreign, Mismatch, per_head
from eventful.surgery.adapters.origin import forward_of


def scaling_spec(block: Foreign) -> BlockSpec:
    """ParallelScalingBlock: one layer makes q, k, v and the MLP's hidden units of one norm."""
    hidden, *widths = block.in_split
    dim, layer, differs = block.in_proj.in_features, block.in_proj, hasattr(block, "sub_norm")

    def part(begin: int, end: int, x: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias[begin:end]
        return F.linear(x, layer.weight[begin:end], bias)

    def packed(x: Tensor) -> Tensor:
        return part(hidden, hidden + sum(widths), x)

    def project(o: Tensor) -> Tensor:
        o = differential_output(block, o) if differs else o
        if block.out_proj is None:
            return block.ls(block.attn_out_proj(o))
        return block.ls(F.linear(o, block.out_proj.weight[:, :dim], block.out_proj.bias))

    def mlp(y: Tensor) -> Tensor:
        y = part(0, hidden, y)
        y = block.mlp_act(y if block.mlp_bias is None else y + block.mlp_bias)
        if block.out_proj is None:
            return block.ls(block.mlp_out_proj(y))
        return block.ls(F.linear(y, block.out_proj.weight[:, dim:]))

    heads, width = block.num_heads, block.head_dim
    biased = layer.bias is not None
    return BlockSpec(
        module=block,
        dim=dim,
        heads=2 * heads if differs else heads,
        head_dim=2 * width if differs else width,
        scale=block.scale,
        norm1=block.in_norm,
        qkv=differential_qkv(block, packed) if differs else _normed(block, packed),
        project=project,
        norm2=block.in_norm,
        mlp=mlp,
        qkv_cost=LinearCost(dim * sum(widths), sum(widths) if biased else 0),
        project_cost=LinearCost(dim * dim, dim),
        mlp_cost=LinearCost(2 * dim * hidden, hidden + (dim if block.out_proj is None else 0)),
        parallel=True,
    )


def things_spec(block: Foreign, attentions: tuple[str, ...]) -> BlockSpec:
    """ParallelThingsBlock: several attentions side by side are one with the heads of all."""
    parts = [(one.norm, one.attn, one.ls) for one in block.attns]
    for _, attention, _ in parts:
        if forward_of(attention) not in attentions:
            raise Mismatch(f"its {type(attention).__name__} is not {' or '.join(attentions)}")
    first = parts[0][1]
    dim, heads, width = first.proj.out_features, first.num_heads, first.head_dim

    def qkv(x: Tensor, index: Tensor, positions: object) -> tuple[Tensor, Tensor, Tensor]:
        made = [
            _normed(attention, attention.qkv)(norm(x), index, positions)
            for norm, attention, _ in parts
        ]
        q, k, v = (torch.cat(one, dim=-1) for one in zip(*made, strict=True))
        return q, k, v

    def project(o: Tensor) -> Tensor:
        outputs = o.chunk(len(parts), dim=-1)
        made = [
            scale(attention.proj(getattr(attention, "norm", nn.Identity())(one)))
            for (_, attention, scale), one in zip(parts, outputs, strict=True)
        ]
        return torch.stack(made).sum(dim=0)

    def mlp(y: Tensor) -> Tensor:
        return torch.stack([one.ls(one.mlp(one.norm(y))) for one in block.ffns]).sum(dim=0)

    return BlockSpec(
        module=block,
        dim=dim,
        heads=heads * len(parts),
        head_dim=width,
        scale=first.scale,
        norm1=nn.Identity(),
        qkv=qkv,
        project=project,
        norm2=nn.Identity(),
        mlp=mlp,
        qkv_cost=linear_cost(*(attention.qkv for _, attention, _ in parts)),
        project_cost=linear_cost(*(attention.proj for _, attention, _ in parts)),
        mlp_cost=linear_cost(block.ffns),
    )


def differential(spec: BlockSpec, attention: Foreign, then: TokenMap) -> BlockSpec:
    """The spec with differential attention: two attentions for each head, over the same values.

    Args:
        then: what follows attention, up to the residual sum.
    """
    return replace(
        spec,
        heads=2 * attention.num_heads,
        head_dim=2 * attention.head_dim,
        qkv=differential_qkv(attention, attention.qkv),
        project=lambda o: then(attention.norm(differential_output(attention, o))),
    )


def differential_qkv(attention: Foreign, packed: TokenMap) -> QKVMap:
    """Queries and keys are half as wide as values: zeros fill them up, and change no product."""
    heads, width = attention.num_heads, attention.head_dim

    def qkv(x: Tensor, index: Tensor, positions: object) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = packed(x).chunk(3, dim=-1)
        q = attention.q_norm(q.unflatten(-1, (2 * heads, width)))
        k = attention.k_norm(k.unflatten(-1, (2 * heads, width)))
        q, k = (F.pad(part, (0, width)).flatten(-2) for part in (q, k))
        v = v.unflatten(-1, (heads, 2 * width)).repeat_interleave(2, dim=-2).flatten(-2)
        return q, k, v

    return qkv


def differential_output(attention: Foreign, o: Tensor) -> Tensor:
    """The difference of the two attentions of each head, normed."""
    one, two = o.unflatten(-1, (attention.num_heads, 2, 2 * attention.head_dim)).unbind(-2)
    result = attention.sub_norm(one - attention._compute_lambda().type_as(o) * two)
    return (result * (1 - attention.lambda_init)).flatten(-2)


def _normed(attention: Foreign, packed: TokenMap) -> QKVMap:
    heads = attention.num_heads

    def qkv(x: Tensor, index: Tensor, positions: object) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = packed(x).chunk(3, dim=-1)
        return per_head(attention.q_norm, q, heads), per_head(attention.k_norm, k, heads), v

    return qkv
