"""Eventful steps that gradients flow through, for training with memory in the loop.

A stream refuses gradients: its memory outlives a step. Here memory is a value. What was computed
in earlier frames is a constant, and gradients flow through the selected tokens of the last one,
as keys and values of the others, too. The rule is that of `Config.fast`: one selection per frame
by the error of the embedded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.models.blocks import Block
from eventful.models.vitdet import ViTDet
from eventful.models.vitdet.backbone import ViTDetBackbone
from eventful.paper.train.world import Recorded, Scenes, as_inputs, street_frames
from eventful.rules.relative import RelativePosition
from eventful.video.world import boxes_of

FRAMES = 4  # of a scene: one computed whole, then eventful ones


@dataclass(frozen=True)
class Memory:
    """What is kept of the frames before.

    Attributes:
        reference: (B, N, D) embedded tokens at their last update.
        keys, values: of each block, (B, N, D).
        output: (B, N, D) of the last block.
    """

    reference: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    output: Tensor

    def detached(self) -> Memory:
        """The same as constants."""
        keys, values = (tuple(t.detach() for t in part) for part in (self.keys, self.values))
        return Memory(self.reference.detach(), keys, values, self.output.detach())


def embedded(trunk: ViTDetBackbone, pixels: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Tokens (B, N, D) ahead of the first block, and their grid."""
    image = trunk.patch_embed(pixels)
    grid = (image.shape[2], image.shape[3])
    return image.flatten(2).transpose(1, 2) + trunk.tables(grid)[0], grid


def flush(trunk: ViTDetBackbone, pixels: Tensor) -> Memory:
    """The memory after a frame that is computed whole."""
    tokens, grid = embedded(trunk, pixels)
    x, keys, values = tokens, [], []
    for block in _blocks(trunk):
        _, k, v = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
        keys.append(k)
        values.append(v)
        x = block(x, grid)
    return Memory(tokens, tuple(keys), tuple(values), x)


def step(trunk: ViTDetBackbone, memory: Memory, pixels: Tensor, r: int) -> Memory:
    """The memory after a frame of which the `r` tokens that changed most are computed."""
    tokens, grid = embedded(trunk, pixels)
    error = (tokens - memory.reference).detach().norm(dim=-1)
    chosen = error.topk(min(r, error.shape[1]), dim=1).indices
    x, keys, values = _rows(tokens, chosen), [], []
    for number, block in enumerate(_blocks(trunk)):
        q, k, v = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
        keys.append(_patched(memory.keys[number], k, chosen))
        values.append(_patched(memory.values[number], v, chosen))
        attended = attend_selected(block, q, keys[-1], values[-1], chosen, grid)
        x = x + block.attn.proj(attended)
        x = x + block.mlp(block.norm2(x))
    return Memory(
        _patched(memory.reference, _rows(tokens, chosen), chosen), tuple(keys), tuple(values),
        _patched(memory.output, x, chosen),
    )  # fmt: skip


def as_image(memory: Memory, grid: tuple[int, int]) -> Tensor:
    """The output as a feature map (B, D, h, w)."""
    return memory.output.transpose(1, 2).unflatten(2, grid)


def attend_selected(
    block: Block, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, grid: tuple[int, int]
) -> Tensor:
    """Attention outputs (B, M, D) of selected tokens over all keys (B, N, D), in their windows."""
    attn, side = block.attn, block.window
    (height, width), heads = grid, attn.heads
    y, x = chosen // width, chosen % width
    if side is not None:  # windows are padded behind the norm, so padding has the bias as keys
        bias = attn.qkv.bias.chunk(3)
        k, v = (_padded(part, grid, side, own) for part, own in ((k, bias[1]), (v, bias[2])))
        height, width = height + -height % side, width + -width % side
    qh, kh, vh = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
    rows = torch.arange(height, device=q.device)
    columns = torch.arange(width, device=q.device)
    scores = None
    if attn.rel_pos_h is not None:
        within = (side, side) if side is not None else grid
        scores = _relative(attn.tables(within), qh, (y, x), (rows, columns), side)
    if side is not None:
        same = (y[:, :, None, None] // side == rows[:, None] // side) & (
            x[:, :, None, None] // side == columns[None, :] // side
        )
        apart = torch.zeros(same.shape, dtype=q.dtype, device=q.device)
        apart = apart.masked_fill(~same, float("-inf")).flatten(2)[:, None]
        scores = apart if scores is None else scores + apart
    out = F.scaled_dot_product_attention(qh, kh, vh, attn_mask=scores, scale=attn.scale)
    return out.transpose(1, 2).flatten(2)


def _relative(
    tables: tuple[Tensor, ...], q: Tensor, place: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor], side: int | None,
) -> Tensor:  # fmt: skip
    """Relative position scores (B, heads, M, keys) of queries (B, heads, M, d) at places."""
    position = RelativePosition(*tables)
    (y, x), (rows, columns) = place, keys
    if side is not None:
        y, x, rows, columns = y % side, x % side, rows % side, columns % side
    down = torch.einsum("bhmd,bmkd->bhmk", q, position.rows[y].to(q.dtype))
    across = torch.einsum("bhmd,bmkd->bhmk", q, position.columns[x].to(q.dtype))
    return (down[..., rows][..., :, None] + across[..., columns][..., None, :]).flatten(3)


def _padded(tokens: Tensor, grid: tuple[int, int], side: int, bias: Tensor) -> Tensor:
    height, width = grid
    image = tokens.unflatten(1, grid)
    wide = bias.to(tokens.dtype).expand(len(tokens), height, -width % side, -1)
    image = torch.cat([image, wide], dim=2)
    low = bias.to(tokens.dtype).expand(len(tokens), -height % side, image.shape[2], -1)
    return torch.cat([image, low], dim=1).flatten(1, 2)


def _blocks(trunk: nn.Module) -> list[Block]:
    return [part for part in trunk.modules() if isinstance(part, Block)]


def _rows(tokens: Tensor, chosen: Tensor) -> Tensor:
    return tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[-1]))


def _patched(memory: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
    index = chosen[..., None].expand(-1, -1, memory.shape[-1])
    return memory.scatter(1, index, rows.to(memory.dtype))


class LoopObjective(nn.Module):
    """A detector's losses on the last of a few frames, with the memory of those before.

    The first frame is computed whole and has losses, too, so that the dense model stays what it
    is.

    Args:
        tokens: from the fewest to the most that a frame updates; each step draws a number.
    """

    def __init__(self, model: ViTDet, tokens: tuple[int, int] = (32, 256)) -> None:
        super().__init__()
        self.model, self.tokens, self.frames = model, tokens, Recorded(street_frames)

    def forward(self, scenes: Scenes) -> dict[str, Tensor]:
        """Losses of one step."""
        model, side = self.model, self.model.config.backbone.size
        with torch.autocast(scenes.seeds.device.type, enabled=False):
            shot = self.frames(scenes.seeds, side, scenes.aspect, scenes.exposures, True, FRAMES)
            pixels, targets, places = as_inputs(shot, boxes_of(shot), side)
        trunk, each = model.backbone, pixels.unflatten(0, (-1, FRAMES))
        low, high = self.tokens
        r = round(low * (high / low) ** float(torch.rand(())))
        memory = flush(trunk, each[:, 0])
        grid = trunk.grid((side, side))
        whole = model.head_losses(as_image(memory, grid), targets[::FRAMES], places[::FRAMES])
        memory = memory.detached()
        with torch.no_grad():
            for frame in range(1, FRAMES - 1):
                memory = step(trunk, memory, each[:, frame], r)
        memory = step(trunk, memory, each[:, -1], r)
        last = slice(FRAMES - 1, None, FRAMES)
        losses = model.head_losses(as_image(memory, grid), targets[last], places[last])
        return {f"eventful_{name}": loss for name, loss in losses.items()} | whole
