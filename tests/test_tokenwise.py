"""Quantised blocks: those that treat each token alone are converted, the others refused."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eventful
import zoo_timm
import zoo_transformers
from eventful import Config, TopR, errors
from eventful.surgery import tokenwise
from guarding import clip, model  # noqa: F401


class Int8Weights(nn.Module):
    """A linear layer whose weights are kept in int8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("kept", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        return F.linear(self.activation(x), self.kept * self.scale, self.bias)

    def activation(self, x):
        return x


class PerToken(Int8Weights):
    """Activations in int8, too, with a scale for each token."""

    def activation(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale


class PerTensor(Int8Weights):
    """With one scale for all tokens."""

    def activation(self, x):
        scale = x.abs().amax() / 127
        return (x / scale).round() * scale


class Watching(Int8Weights):
    """Remembers the largest value it has seen, as observers do."""

    largest = 0.0

    def activation(self, x):
        self.largest = max(self.largest, float(x.abs().max()))
        return x


def quantised(model: nn.Module, kind: type[Int8Weights]) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, kind(child))
    return model.eval()


def dynamic(model: nn.Module) -> nn.Module:
    """Torch's own dynamic quantisation: one activation scale per call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


FAMILIES = {
    "vit": zoo_timm.ZOO["vit"],
    "eva02": zoo_timm.ZOO["eva02"],
    "sam": zoo_timm.ZOO["sam"],
    "torchvision": zoo_timm.ZOO["torchvision"],
    "hf dinov3": zoo_transformers.ZOO["dinov3"],
    "hf vitdet": zoo_transformers.ZOO["vitdet"],
}


@pytest.mark.parametrize("make", [dynamic, lambda m: quantised(m, PerTensor)], ids=["torch", "own"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_scale_shared_by_tokens_is_refused(family, make):
    model = make(FAMILIES[family].make())
    with pytest.raises(errors.NoMatchError, match=r"activation scale per token"):
        eventful.convert(model)
    found = eventful.inspect(model, FAMILIES[family].size)
    assert found.matched == 0
    assert all("would drift" in block.reason for block in found.blocks)


@pytest.mark.parametrize("kind", [Int8Weights, PerToken])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_alone_or_a_scale_per_token_are_converted(family, kind):
    model = quantised(FAMILIES[family].make(), kind)
    assert eventful.inspect(model, FAMILIES[family].size).matched == 3


def test_a_still_video_does_not_drift(model, clip):
    stream = eventful.Stream(eventful.convert(quantised(model, PerToken), Config.fast(TopR(5))))
    first = stream(clip[0])
    for _ in range(4):
        again = stream(clip[0])
    assert (again - first).abs().max() <= 1e-5 * first.abs().max()


def test_a_block_that_cannot_be_run_is_refused_by_name(model):
    class Int4Linear(Int8Weights):
        def activation(self, x):
            raise RuntimeError("needs a CUDA device")

    quantised(model, Int4Linear)
    reason = eventful.inspect(model, (32, 40)).blocks[0].reason
    assert "Int4Linear" in reason
    assert "needs a CUDA device" in reason


def test_half_precision_is_rounding(model):
    assert eventful.inspect(quantised(model, PerToken).bfloat16(), (32, 40)).matched == 3


def test_the_model_itself_is_not_run(model):
    eventful.inspect(quantised(model, Watching), (32, 40))
    assert all(module.largest == 0.0 for module in model.modules() if isinstance(module, Watching))


def test_a_converted_model_can_be_inspected(model):
    assert eventful.inspect(eventful.convert(quantised(model, PerToken)), (32, 40)).matched == 3


def test_float_models_are_not_run(monkeypatch):
    def run(*_):
        raise AssertionError("run")

    monkeypatch.setattr(tokenwise, "_compare", run)
    for entry in (*zoo_timm.ZOO.values(), *zoo_transformers.ZOO.values()):
        eventful.convert(entry.make())
