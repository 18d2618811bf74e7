"""Small models that do something a description of a usual block has no place for."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structures import SIZE, Trunk

TOKENS = 22  # of a frame of SIZE, with two special ones


class Block(nn.Module):
    """A usual block, whose parts subclasses change."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.heads, self.act = 4, act
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.fc1, self.fc2 = nn.Linear(32, 48), nn.Linear(48, 32)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k, v = self.keys(k, v)
        return self.proj((self.weights(self.scores(q, k)) @ v).transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def trunk(block: Callable[[], nn.Module] = Block, kind: type[Trunk] = Trunk, depth: int = 3) -> Any:
    """A model of such blocks."""
    return kind(*(block() for _ in range(depth))).eval()


def apart(n: int) -> Tensor:
    """How far tokens are from each other, (n, n)."""
    at = torch.arange(n)
    return (at[:, None] - at[None]).abs()


# Blocks that differ from the usual one with more tokens than a proof on few would have.


class SlidingWindow(Block):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k).masked_fill(apart(q.shape[-2]) >= 21, -1e9)


class PooledBeyond(Block):
    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (k[:, :, ::2], v[:, :, ::2]) if k.shape[-2] > 20 else (k, v)


class MaskedBeyond(Block):
    """The mask of the first 20 tokens is empty."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.zeros(64, 64)
        mask[20:, :5] = -1e9
        self.register_buffer("mask", mask)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        n = q.shape[-2]
        return super().scores(q, k) + self.mask[:n, :n].to(q)


class MaskedLater(Block):
    """Adds a mask that is zero until another one is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(TOKENS, TOKENS))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        n = q.shape[-2]
        return super().scores(q, k) + self.mask[:n, :n].to(q)


class ConvolvesGrid(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 32, 3, padding=1, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.shape[1] != TOKENS:
            return x
        grid = x[:, 2:].mT.unflatten(-1, (4, 5))
        return torch.cat([x[:, :2], x[:, 2:] + self.conv(grid).flatten(2).mT], 1)


class MixesTokens(Block):
    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Linear(TOKENS, TOKENS)

    def mlp(self, x: Tensor) -> Tensor:
        mixed = self.across(x.mT).mT if x.shape[1] == TOKENS else 0
        return super().mlp(x) + mixed


class AloneInBatch(Block):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * (0.5 if len(q) == 1 else 1)


# Blocks that differ with large values, with zeros, or in another precision.


class SoftCap(Block):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 1e4 * torch.tanh(super().scores(q, k) / 1e4)


class ClampedScores(Block):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k).clamp(-30, 30)


class PaddingOfZeros(Block):
    def forward(self, x: Tensor) -> Tensor:
        self._padding = (x == 0).all(-1)
        return super().forward(x)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k).masked_fill(self._padding[:, None, None], -1e9)


class SinglePrecision(Block):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * (0.5 if q.dtype == torch.float32 else 1)


# Blocks with a memory.


class Remembers(Block):
    """Adds a part of the change since the last call."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.last is not None and self.last.shape == y.shape:
            y = y + 0.1 * (y - self.last)
        self.last = y
        return y


class Counts(Block):
    """Does something else after many calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 1000 else 2)


class WritesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x


class DropsInEval(Block):
    def attention(self, x: Tensor) -> Tensor:
        return F.dropout(super().attention(x), 0.1, training=True)


class ShakesPython(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.uniform(0.5, 2)


class KeepsMaps(Block):
    """Keeps its attention for whoever looks; it does not use it."""

    def weights(self, scores: Tensor) -> Tensor:
        self.map = super().weights(scores)
        return self.map


class Notes(Block):
    """Notes the mean of its tokens somewhere for the model; it does not use it."""

    def __init__(self, note: Callable[[Notes, Tensor], None]) -> None:
        super().__init__()
        self.note, self.found, self.held, self.shared = note, None, {}, Settings(0.0)
        self.line: deque[Tensor] = deque(maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        self.note(self, x.mean(1, keepdim=True))
        return super().forward(x)


def note_in_dict(block: Notes, mean: Tensor) -> None:
    block.held["mean"] = mean


def note_in_line(block: Notes, mean: Tensor) -> None:
    block.line.append(mean)


def note_in_object(block: Notes, mean: Tensor) -> None:
    block.shared.mean = mean


def note_in_new(block: Notes, mean: Tensor) -> None:
    block.mean = mean


def note_in_none(block: Notes, mean: Tensor) -> None:
    block.found = mean


# Blocks with other arithmetic.


class Sandwich(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm3, self.norm4 = nn.LayerNorm(32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm3(self.attention(self.norm1(x)))
        return x + self.norm4(self.mlp(self.norm2(x)))


class QueryKeyNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(8), nn.LayerNorm(8)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(self.q_norm(q), self.k_norm(k))


class Cosine(Block):
    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.ones(4, 1, 1))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.sharpness.exp()


class LearnedScale(Block):
    """Passes the value of a parameter on as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(5.0))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, scale=float(self.sharpness))
        return self.proj(attended.transpose(1, 2).flatten(2))


class HeadGates(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(32, 4)

    def attention(self, x: Tensor) -> Tensor:
        self.open = self.gates(x).sigmoid().mT[..., None]
        return super().attention(x)

    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(scores) * self.open


class Alibi(Block):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) - 0.05 * apart(q.shape[-2]).to(q)


class QuietSoftmax(Block):
    def weights(self, scores: Tensor) -> Tensor:
        return scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))


class Register(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register = nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([self.register.expand(len(x), -1, -1), x], 1))[:, 1:]


class LeavesOut(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.1 else super().forward(x)


# Blocks whose settings a model may set, each on an attribute of another kind.


class Scaled(Block):
    """Scores times a factor that is kept somewhere."""

    def __init__(self, keep: Callable[[Scaled, float], None]) -> None:
        super().__init__()
        keep(self, 1.0)

    def factor(self) -> Any:
        if "_private" in vars(self):
            return self._private
        if "options" in vars(self):
            return self.options["scores"][0]
        if "config" in vars(self):
            return self.config.factor
        return self.times(1.0) if "times" in vars(self) else self.table

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * self.factor()


class Settings:
    """A config as libraries have them."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


def keep_private(block: Scaled, factor: float) -> None:
    block._private = factor


def keep_in_dict(block: Scaled, factor: float) -> None:
    block.options = {"scores": [factor]}


def keep_in_config(block: Scaled, factor: float) -> None:
    block.config = Settings(factor)


def keep_in_lambda(block: Scaled, factor: float) -> None:
    block.times = lambda x: x * factor


def keep_in_buffer(block: Scaled, factor: float) -> None:
    block.register_buffer("table", torch.tensor(factor))


# Models around usual blocks.


class Biased(Block):
    """Adds a bias that the model may set."""

    def __init__(self) -> None:
        super().__init__()
        self.bias: Tensor | None = None

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        return scores if self.bias is None else scores + self.bias.to(scores)


class SetsBias(Trunk):
    """Sets a bias on its blocks for each call."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.table = nn.Parameter(torch.randn(TOKENS, TOKENS))
        self.brightest = -1.0

    def forward(self, frame: Tensor, every: bool = False) -> Any:
        for block in self.stages:
            block.bias = self.table if frame.mean() > self.brightest else None
        try:
            return super().forward(frame, every)
        finally:
            for block in self.stages:
                block.bias = None


class Loop(Trunk):
    """A loop that `after` sees: the number of the block and its output."""

    order = (0, 1, 2)

    def after(self, frame: Tensor, at: int, x: Tensor) -> Any:
        return 0

    def forward(self, frame: Tensor, every: bool = False) -> Tensor:
        x, added = self.embed(frame), 0
        for at in self.order:
            x = self.stages[at](x)
            added = added + self.after(frame, at, x)
        return self.norm(x) + added


class OtherOrder(Loop):
    order = (2, 0, 1)


class ReadsShape(Loop):
    def after(self, frame: Tensor, at: int, x: Tensor) -> Any:
        return x.shape[1] / 10


class ReadsData(Loop):
    def after(self, frame: Tensor, at: int, x: Tensor) -> Any:
        return x.data.mean()


class ReadsTransposed(Loop):
    def after(self, frame: Tensor, at: int, x: Tensor) -> Any:
        return x.mT.mean()


class ReadsDevice(Loop):
    def after(self, frame: Tensor, at: int, x: Tensor) -> Any:
        return torch.zeros((), device=x.device, dtype=x.dtype) + x.ndim


class ReadsBright(Loop):
    """Uses outputs of bright frames."""

    def after(self, frame: Tensor, at: int, x: Tensor) -> Any:
        return x.mean() if frame.mean() > 1 else 0


class StopsBright(Trunk):
    """Leaves its last block out for bright frames."""

    def forward(self, frame: Tensor, every: bool = False) -> Tensor:
        x = self.embed(frame)
        for block in self.stages[: 2 if frame.mean() > 1 else 3]:
            x = block(x)
        return x


class SkipsBright(Trunk):
    """Leaves its second block out for bright frames."""

    def forward(self, frame: Tensor, every: bool = False) -> Tensor:
        x = self.embed(frame)
        for block in self.stages[:: 2 if frame.mean() > 1 else 1]:
            x = block(x)
        return x


# Models whose tokens lie in another order.


class Arranged(Trunk):
    """Looks at the whole frame ahead of its patches, so that every token depends on all of it."""

    def arrange(self, grid: Tensor) -> Tensor:
        return grid.flatten(2).mT

    def embed(self, frame: Tensor) -> Tensor:
        frame = (frame - frame.mean((1, 2, 3), keepdim=True)) / frame.std((1, 2, 3), keepdim=True)
        patches = self.arrange(self.stem(frame))
        return torch.cat([self.special.expand(len(frame), -1, -1), patches], 1) + self.places


class ByColumn(Arranged):
    def arrange(self, grid: Tensor) -> Tensor:
        return grid.mT.flatten(2).mT


class FromBelow(Arranged):
    def arrange(self, grid: Tensor) -> Tensor:
        return grid.flip(2).flatten(2).mT


class Shuffled(Arranged):
    def arrange(self, grid: Tensor) -> Tensor:
        return grid.flatten(2).mT[:, torch.arange(20) * 7 % 20]


class MeanBehind(Trunk):
    """The mean of the patches as last tokens."""

    def embed(self, frame: Tensor) -> Tensor:
        patches = self.stem(frame).flatten(2).mT
        mean = patches.mean(1, keepdim=True)
        return torch.cat([patches, mean, 2 * mean], 1) + self.places


class OnGrid(Block):
    """Takes and returns tokens (B, h, w, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1, 2)).unflatten(1, x.shape[1:3])


class Resizes(Trunk):
    """Brings every frame to one size, whatever its sides are."""

    def forward(self, frame: Tensor, every: bool = False) -> Any:
        x = self.stem(F.interpolate(frame, SIZE)).permute(0, 2, 3, 1)
        for block in self.stages:
            x = block(x)
        return x.mean((1, 2))


class WritesFrame(Trunk):
    """Normalises frames in place."""

    def forward(self, frame: Tensor, every: bool = False) -> Any:
        return super().forward(frame.sub_(0.5).div_(0.25), every)


class Stateful(Trunk):
    """Changes itself in every call, and draws random numbers."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.calls, self.sizes = 0, []
        self.register_buffer("seen", torch.zeros(()))
        self.draws = torch.Generator().manual_seed(1)

    def forward(self, frame: Tensor, every: bool = False) -> Any:
        self.calls += 1
        self.sizes.append(SIZE)
        self.seen += 1
        with torch.no_grad():
            self.special.mul_(1.5)
        torch.rand((), generator=self.draws)
        torch.rand(())
        return super().forward(frame, every)


class ReadsMap(Trunk):
    """Uses what its blocks keep."""

    def forward(self, frame: Tensor, every: bool = False) -> Any:
        result = super().forward(frame, every)
        return result * self.stages[0].map.max()


class ReadsNotes(Trunk):
    """Uses what its blocks noted, if they have."""

    def forward(self, frame: Tensor, every: bool = False) -> Any:
        x = self.embed(frame)
        for block in self.stages:
            x = block(x)
        for block in self.stages:
            new = [getattr(held, "mean", None) for held in (block, block.shared)]
            kept = (block.found, *block.line, *block.held.values(), *new)
            found = [value for value in kept if isinstance(value, Tensor)]
            x = x + sum(found)
        return x


class Switched(Block):
    """A block with arguments that have defaults, and others."""

    def forward(self, x: Tensor, residual: bool = True, *rest: Any) -> Tensor:
        y = super().forward(x)
        return (y if residual else y - x) * (2 if any(rest) else 1)


class Switches(Trunk):
    arguments: tuple[Any, ...] = ()

    def forward(self, frame: Tensor, every: bool = False) -> Any:
        x = self.embed(frame)
        for block in self.stages:
            x = block(x, *self.arguments)
        return x
