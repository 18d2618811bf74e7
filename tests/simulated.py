"""A simulated machine: steps take as long as a formula says, whatever this one is doing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zoo_timm
from eventful.cost.times import use_clock


class Machine:
    """A clock that model code moves: each call of an MLP takes `ms(tokens)` milliseconds.

    Args:
        ms: milliseconds of a call on so many tokens.
    """

    def __init__(self, ms: Callable[[int], float]) -> None:
        self.ms = ms
        self.seconds = 0.0

    def watch(self, model: nn.Module) -> nn.Module:
        """Have the blocks of a timm model move the clock."""
        for block in model.blocks:
            block.mlp.register_forward_pre_hook(self._run)
        return model

    def _run(self, module: nn.Module, args: tuple[torch.Tensor]) -> None:
        self.seconds += self.ms(args[0].shape[1]) / 1000

    def __enter__(self) -> Machine:
        self._clock = use_clock(lambda: self.seconds)
        self._clock.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._clock.__exit__(*raised)


def affine(tokens: int, overhead: float) -> Callable[[int], float]:
    """A dense step takes 100 ms a block; an eventful one its share of that and `overhead` ms."""
    return lambda count: 100.0 if count >= tokens else overhead + 100.0 * count / tokens


LARGE = (192, 200)  # 24 x 25 patches of 8 x 8: more than a sample, several buckets


def large_vit(**options: object) -> nn.Module:
    """A ViT with 601 tokens that is narrow enough to be run in tests."""
    torch.manual_seed(7)
    return zoo_timm.plain(img_size=LARGE, embed_dim=16, depth=2, num_heads=2, **options)()


def clip_of(shares: list[float], size: tuple[int, int] = LARGE, *, noise: float = 0.01):
    """Frames in which, at frame t, a share of the rows of patches is new; and sensor noise."""
    make = torch.Generator().manual_seed(3)
    frame = torch.randn(1, 3, *size, generator=make)
    clip = []
    for share in shares:
        frame = frame.clone()
        rows = round(share * size[0] / 8) * 8
        frame[..., :rows, :] = torch.randn(1, 3, rows, size[1], generator=make)
        clip.append(frame + noise * torch.randn(frame.shape, generator=make))
    return clip


@pytest.fixture(params=["plain", "resident"])
def path(request, monkeypatch):
    """Plain steps, and the steps of a GPU run on the CPU."""
    if request.param == "resident":
        monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    return request.param
