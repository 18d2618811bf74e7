"""What tests of exported steps share: a tiny model, changing frames, comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import eventful
from eventful.surgery.libraries import load

SIDE, PATCH, TOKENS = 64, 8, 65
CLOSE = 1e-4  # of outputs in fp32, in units of the largest
TIE = 1e-5  # errors nearer than this may be ranked either way


def tiny_vit(depth: int = 2, **options: Any) -> nn.Module:
    """64 patch tokens and a class token."""
    torch.manual_seed(0)
    settings = {"img_size": SIDE, "patch_size": PATCH, "num_classes": 5, "embed_dim": 48}
    settings |= {"num_heads": 3, "depth": depth, **options}
    return load("timm").create_model("vit_tiny_patch16_224", **settings).eval()


def changing(count: int, seed: int = 0, side: int = SIDE, patch: int = PATCH) -> Iterator[Tensor]:
    """Frames (1, 3, side, side): a patch is new in each, and all of it is a little noisy."""
    draw = torch.Generator().manual_seed(seed)
    frame = torch.rand(1, 3, side, side, generator=draw)
    for _ in range(count):
        y, x = (torch.randint(0, side // patch - 1, (2,), generator=draw) * patch).tolist()
        frame = frame.clone()
        frame[..., y : y + 2 * patch, x : x + patch] = torch.rand(
            1, 3, 2 * patch, patch, generator=draw
        )
        yield frame + 0.01 * torch.randn(frame.shape, generator=draw)


def selected(stream: eventful.Stream) -> tuple[set[int], Tensor]:
    """The tokens that a stream with maps updated, and what it ranked all by."""
    gate = next(iter(stream.last.gates.values()))
    return set(gate.mask[0].nonzero().flatten().tolist()), gate.error[0]


def same_choice(ours: set[int], theirs: set[int], score: Tensor) -> bool:
    """Whether two selections differ in tokens of nearly equal errors alone."""
    if len(ours) != len(theirs):
        return False
    here, there = sorted(ours - theirs), sorted(theirs - ours)
    if not here:
        return True
    apart = (
        (score[here].max() - score[there].min()).abs(),
        (score[there].max() - score[here].min()).abs(),
    )
    return bool(max(apart) < TIE)


def assert_steps_agree(
    runtime: Any, model: nn.Module, frames: Iterator[Tensor], policy: eventful.Policy | None = None
) -> None:
    """From equal state each step gives the library's output, tokens and state."""
    stream = eventful.Stream(model, policy, maps=True)
    stream(next(frames))
    for number, frame in enumerate(frames):
        ours = runtime.load(stream.snapshot())
        expected, got = stream(frame), ours(frame)
        assert stream.last.flushed == [ours.last.flushed], number
        if not ours.last.flushed:
            theirs, score = selected(stream)
            mine = set(ours.last.index.tolist())
            assert same_choice(mine, theirs, score), (number, mine ^ theirs)
            if mine != theirs:
                continue
        assert_close(got, expected, number)
        held = stream._state.detached().tensors
        for name, value in ours._memory.read().items():
            if name in held:
                theirs = held[name] if value.dim() == 1 else held[name][0]
                assert_close(value, theirs, (number, name))
            else:
                assert value.isnan().all(), (number, name)  # missing


def assert_close(got: Tensor, expected: Tensor, where: object) -> None:
    """Equal up to rounding in fp32."""
    assert torch.equal(got.isnan(), expected.isnan()), where
    apart = (got - expected).nan_to_num().abs().max()
    assert apart <= CLOSE * expected.nan_to_num().abs().max(), (where, float(apart))
