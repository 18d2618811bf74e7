"""Transformers recognised by their structure: what is found, proven and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eventful
import structures
from clips import moving_square
from eventful import Config, Threshold, TopR
from eventful.errors import NoMatchError, UnsupportedError
from eventful.surgery.adapter import Mismatch
from eventful.surgery.structure import proof
from structures import SIZE, Interleaved, PreNorm, Split, Trunk
from tolerances import assert_near
from zoo_timm import spread

FOUND: dict[str, Callable[[], nn.Module]] = {
    "split": structures.split,
    "interleaved": structures.interleaved,
    "nested": structures.nested,
    "torch post-norm": structures.torch_layers,
    "torch pre-norm": lambda: structures.torch_layers(norm_first=True, activation="gelu"),
}


def model_of(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return spread(build())


@pytest.mark.parametrize("name", FOUND)
def test_every_way_of_writing_is_found(name: str) -> None:
    found = eventful.inspect(model_of(FOUND[name]))
    assert [block.reason for block in found.blocks] == [None] * 3
    assert {block.adapter for block in found.blocks} == {"structure"}
    assert (found.size, list(found.tokens.values())) == (SIZE, [22])


@pytest.mark.parametrize("preset", ["fast", "exact", "paper"])
@pytest.mark.parametrize("name", FOUND)
def test_all_tokens_is_dense(name: str, preset: str) -> None:
    model = model_of(FOUND[name])
    stream = eventful.Stream(eventful.convert(model, Config.preset(preset, TopR(10**6))))
    for frame in moving_square(3, SIZE, batch=2, noise=0.1):
        assert_near(stream(frame), model(frame))


@pytest.mark.parametrize("name", FOUND)
def test_changes_are_followed(name: str) -> None:
    """Few tokens pass the first gate, and the output is dense."""
    model = model_of(FOUND[name])
    stream = eventful.Stream(eventful.convert(model, Config.exact(Threshold(1e-6))))
    for frame in moving_square(4, SIZE):
        assert_near(stream(frame), model(frame))
    assert stream.last.updated["stages.0.qkv"] < 22


def test_the_layout_is_found() -> None:
    stream = eventful.Stream(eventful.convert(model_of(structures.split), Config.fast(TopR(1))))
    stream(moving_square(1, SIZE)[0])
    (layout,) = stream.last.layouts.values()
    assert (layout.prefix, layout.grid, layout.suffix) == (2, (4, 5), 0)


def test_only_a_plain_loop_passes_few_tokens_on() -> None:
    """The loop keeps every output if asked to: then each is that of all tokens."""
    model = model_of(structures.split)
    stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(10**6), scene_cut=None)))
    clip = moving_square(3, SIZE, noise=0.1)
    stream(clip[0])
    lean = len(stream.snapshot())
    stream.policy = TopR(4)
    assert stream(clip[1], every=True).shape == (1, 3, 22, 32)
    assert len(stream.snapshot()) > lean  # outputs of all blocks are kept now
    stream.policy = TopR(10**6)
    assert_near(stream(clip[2], every=True), model(clip[2], every=True))


class Between(Trunk):
    """Adds something between blocks."""

    def forward(self, frame: Tensor, every: bool = False) -> Tensor:
        x = self.embed(frame)
        for block in self.stages:
            x = block(x) + self.places
        return x


def test_what_is_added_between_blocks_reaches_all_tokens() -> None:
    model = model_of(lambda: Between(*(PreNorm(32, Split(32, 4)) for _ in range(3))))
    for policy in (TopR(10**6), TopR(4)):
        stream = eventful.Stream(eventful.convert(model, Config.fast(policy)))
        for frame in moving_square(3, SIZE, noise=0.1):
            got = stream(frame)
            assert got.shape == (1, 22, 32)
            if policy.r > 22:
                assert_near(got, model(frame))


class Talking(Split):
    """Mixes its heads after the softmax."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.talk = nn.Parameter(torch.randn(heads, heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        weights = torch.einsum("bhnm,hg->bgnm", (q @ k.mT * 8**-0.5).softmax(-1), self.talk)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Neighbours(PreNorm):
    """Its MLP looks at the token before."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.small * self.mix(self.a(x))
        return x + self.mlp(self.b(x))

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__(dim, attention)
        del self.gate, self.up, self.down
        self.mlp = Shifted(dim)


class Shifted(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).roll(1, dims=1))


class Rotary(PreNorm):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x * table)


class Causal(Interleaved):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (self.heads, 3, -1)).transpose(1, 3).unbind(1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.to_out(attended.transpose(1, 2).flatten(2))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "heads that talk": (lambda: PreNorm(32, Talking(32, 4)), r"differ .* by \d\.\de"),
    "neighbours": (lambda: Neighbours(32, Split(32, 4)), r"differ .* by \d\.\de"),
    "an argument": (lambda: Rotary(32, Split(32, 4)), "needs `table` beside the tokens"),
    "causal": (lambda: PreNorm(32, Causal(32, 4)), "attention is causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_part(name: str) -> None:
    build, reason = REFUSED[name]
    model = Trunk(*(build() for _ in range(2)))
    with pytest.raises(NoMatchError, match=reason):
        eventful.convert(model)


def test_weights_near_zero_hide_nothing() -> None:
    """With the block's own weights, attention that is wrong would pass."""
    block = PreNorm(32, Talking(32, 4))
    nn.init.zeros_(block.small)
    with pytest.raises(Mismatch, match="differ"):
        proof.described(block)


def test_the_proof_leaves_the_model_and_the_random_state_alone() -> None:
    model = structures.split()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    eventful.inspect(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_every_block_is_proven_once_and_again_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    describe = proof._describe
    monkeypatch.setattr(proof, "_describe", lambda *args: made.append(args) or describe(*args))
    model = structures.split().eval()
    stream = eventful.Stream(eventful.convert(model))
    for frame in moving_square(3, SIZE):
        stream(frame)
    assert [args[0] for args in made] == list(model.stages)
    model.stages[1].mix.heads = 2
    assert eventful.inspect(model).matched == 3
    assert [args[0] for args in made[3:]] == [model.stages[1]]


def test_a_text_encoder_beside_it_is_left_alone() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sight = structures.split()
            self.words = nn.Embedding(9, 32)
            self.text = nn.ModuleList(PreNorm(32, Split(32, 4)) for _ in range(2))

        def forward(self, frame: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            words = self.words(text)
            for block in self.text:
                words = block(words)
            return self.sight(frame), words

    model = Both().eval()
    assert [block.name for block in eventful.inspect(model).blocks] == [
        f"sight.stages.{i}" for i in range(3)
    ]
    stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(10**6))))
    text = torch.arange(5)[None]
    for frame in moving_square(2, SIZE, noise=0.1):
        for got, expected in zip(stream(frame, text), model(frame, text), strict=True):
            assert_near(got, expected)


def test_an_argument_beside_the_tokens_is_refused_in_a_stream() -> None:
    class Masked(Trunk):
        def forward(self, frame: Tensor, every: bool = False) -> Tensor:
            x, mask = self.embed(frame), None if frame.mean() < 1e3 else self.places
            for block in self.stages:
                (x,) = block(x, mask)
            return x

    torch.manual_seed(0)
    blocks = (structures.Parallel(32, Interleaved(32, 4)) for _ in range(2))
    stream = eventful.Stream(eventful.convert(Masked(*blocks).eval()))
    frame = moving_square(1, SIZE)[0]
    stream(frame)
    with pytest.raises(UnsupportedError, match="`mask` was passed"):
        stream(frame + 1e4)
