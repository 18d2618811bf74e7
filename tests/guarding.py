"""A stream to be misused, and the check that misuse left it as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import eventful
import zoo_timm
from clips import moving_square
from eventful import Config, TopR

ENTRY = zoo_timm.ZOO["vit"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ENTRY.make()


@pytest.fixture
def clip():
    return moving_square(6, ENTRY.size, noise=0.05)


@pytest.fixture(params=["fast", "exact", "paper", "tokenwise", "stgt"])
def stream(request, model):
    return eventful.Stream(eventful.convert(model, Config.preset(request.param, TopR(4))))


@pytest.fixture
def converted(model):
    return eventful.convert(model, Config.fast(TopR(4)))


@pytest.fixture
def batch(converted):
    made = eventful.StreamBatch(converted)
    for name in ("gate", "hall", "yard"):
        made.join(name)
    return made


def holds(stream):
    """A copy of all that shapes the stream's next frame."""
    state = {name: tensor.clone() for name, tensor in stream._state.tensors.items()}
    return state, list(stream._state.frames), stream.policy, stream._signature


def unchanged(stream, before):
    state, frames, policy, signature = before
    same = stream._state.tensors.keys() == state.keys() and all(
        torch.equal(stream._state[name], state[name]) for name in state
    )
    return same and (stream._state.frames, stream.policy, stream._signature) == (
        frames,
        policy,
        signature,
    )


def refused(stream, error, frame, match=None):
    """The step raises, and the stream is as it was."""
    before = holds(stream)
    with pytest.raises(error, match=match):
        stream(frame)
    assert unchanged(stream, before)


class Around(nn.Module):
    """A user's model around a ViT; its forward is `run(vit, ...)`."""

    def __init__(self, vit: nn.Module, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.vit, self.run = vit, run
        self.eval()

    def forward(self, *args: Tensor) -> Tensor:
        return self.run(self.vit, *args)


class PeftLike(nn.Module):
    """A linear layer with low-rank adapters, laid out as peft's LoraLayer is."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        for name in ("default", "other"):
            self.lora_A[name] = nn.Linear(base.in_features, rank, bias=False)
            self.lora_B[name] = nn.Linear(rank, base.out_features, bias=False)
            self.scaling[name] = 2.0
        self._disable_adapters = False
        self._active_adapter: str | list[str] = "default"
        self.merged_adapters: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        active = self._active_adapter
        for name in [active] if isinstance(active, str) else active:
            if not self._disable_adapters and name not in self.merged_adapters:
                result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result

    def merge(self) -> None:
        """Add the first adapter to the weights, past their version counter, as peft does."""
        delta = self.lora_B["default"].weight @ self.lora_A["default"].weight
        self.base_layer.weight.data += delta.detach() * self.scaling["default"]
        self.merged_adapters.append("default")


class HomeMade(nn.Module):
    """A linear layer with one low-rank adapter, as one writes it oneself."""

    enabled = True

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        return result + self.scale * self.up(self.down(x)) if self.enabled else result


def adapted(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """The model with adapters around the first linear layer of every MLP."""
    for block in model.blocks:
        block.mlp.fc1 = kind(block.mlp.fc1)
    return model.eval()
