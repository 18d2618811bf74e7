"""What depends on weights and frame size alone is computed once in a stream, and never outside."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import eventful
import zoo_timm
import zoo_transformers
from clips import moving_square
from eventful import Config, Stream, StreamBatch, TopR
from eventful.errors import WeightsChangedError
from eventful.models.blocks import at_size
from eventful.models.vitdet import BackboneConfig, ViTDetBackbone
from eventful.models.vivit import SpatialModel, ViViTConfig
from zoo_timm import Entry, named, plain, rotary
from zoo_transformers import WIDE, interpolated

DYNAMIC = {"img_size": 32, "dynamic_img_size": True}
STATIC = {"img_size": (40, 24)}


def backbone(resize: str = "linear") -> Callable[[], nn.Module]:
    config = BackboneConfig(
        size=64, trained_size=64, dim=32, depth=3, heads=2, window=3, global_blocks=(1,),
        pretrained_grid=3, rel_pos_resize=resize,
    )  # fmt: skip
    return lambda: zoo_timm.spread(ViTDetBackbone(config))


def spatial() -> nn.Module:
    config = ViViTConfig(size=32, frames=4, patch=8, dim=32, depth=3, temporal_depth=1, heads=2)
    return zoo_timm.spread(SpatialModel(config))


def clip_of_two(run: Callable[..., Tensor], frame: Tensor) -> Tensor:
    return run(frame[:, :, None].expand(-1, -1, 2, -1, -1).contiguous())


def intermediates(run: Callable[..., Tensor], frame: Tensor) -> Tensor:
    options = {"indices": [0, 2], "intermediates_only": True}
    if isinstance(run, Stream | StreamBatch):
        return torch.cat(run.call("forward_intermediates", frame, **options))
    return torch.cat(run.forward_intermediates(frame, **options))


TIMM = {
    "vit": Entry(plain(**DYNAMIC, reg_tokens=2), (40, 24)),
    "vit_patches_alone": Entry(plain(**DYNAMIC, no_embed_class=True), (40, 24)),
    "deit_distilled": Entry(named("deit_tiny_distilled_patch16_224", **DYNAMIC), (40, 24)),
    "eva_absolute": Entry(rotary(**DYNAMIC), (40, 24)),
    "eva_mixed": Entry(rotary(**DYNAMIC, rope_type="mixed"), (40, 24)),
    "eva_mixed_one_size": Entry(rotary(**STATIC, rope_type="mixed"), (40, 24)),
    "dinov3": Entry(named("vit_small_patch16_dinov3", **DYNAMIC, global_pool=""), (40, 24)),
    "sam": replace(zoo_timm.ZOO["sam"], size=(40, 56)),
    "sam_intermediates": replace(zoo_timm.ZOO["sam"], size=(40, 56), call=intermediates),
}
HF = {
    **{
        name: zoo_transformers.ZOO[name]
        for name in ("vit", "dinov2", "dinov2_registers", "dinov3", "siglip_vision", "yolos")
    },
    **{name: zoo_transformers.ZOO[name] for name in ("dinov3_backbone", "vitdet", "vitdet_plain")},
    "deit": replace(zoo_transformers.ZOO["deit"], size=WIDE, call=interpolated),
    "clip": replace(zoo_transformers.ZOO["clip_vision"], size=WIDE, call=interpolated),
}
OWN = {
    "vitdet_own": Entry(backbone(), (64, 96)),
    "vitdet_own_bicubic": Entry(backbone("bicubic"), (64, 96)),
    "vivit_own": Entry(spatial, (40, 24), call=clip_of_two),
}
FAMILIES = {
    **{f"timm_{name}": entry for name, entry in TIMM.items()},
    **{f"hf_{name}": entry for name, entry in HF.items()},
    **OWN,
}
COUNTED = ("upsample", "aten.sin", "aten.cos")


class Resizing(TorchDispatchMode):
    """Counts the operations that resize tables or make rotary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(part in str(func) for part in COUNTED)
        return func(*args, **(kwargs or {}))


@dataclass
class Subject:
    entry: Entry
    model: nn.Module

    def stream(self, policy: eventful.Policy | None = None, **options) -> Stream:
        config = Config.fast(policy or TopR(4), fallback=False, **options)
        return Stream(eventful.convert(self.model, config))

    def clip(self, frames: int, size: tuple[int, int] | None = None) -> list[Tensor]:
        return moving_square(frames, size or self.entry.size, noise=0.05)

    def run(self, runner: Callable, frame: Tensor) -> Tensor:
        with torch.no_grad():
            return self.entry.output(self.entry.call(runner, frame))


@pytest.fixture(params=FAMILIES)
def subject(request) -> Subject:
    torch.manual_seed(3)
    entry = FAMILIES[request.param]
    return Subject(entry, entry.make())


@pytest.fixture(params=["plain", "resident"])
def steps(request, monkeypatch) -> str:
    if request.param == "resident":
        monkeypatch.setattr("eventful.residence.DEVICES", {"cpu"})
    return request.param


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_nothing_is_resized_after_the_first_frames(subject, steps):
    stream = subject.stream()
    clip = subject.clip(6)
    counts = []
    for frame in clip:
        with Resizing() as resizing:
            subject.run(stream, frame)
        counts.append(resizing.count)
    assert counts[0] > 0, "the case has nothing to resize"
    assert counts[2:] == [0] * 4
    stream.flush()
    with Resizing() as resizing:
        subject.run(stream, clip[0])
    assert resizing.count == 0


def test_equal_to_the_dense_model(subject, steps):
    stream = subject.stream(TopR(10_000))
    for frame in subject.clip(3):
        close(subject.run(stream, frame), subject.run(subject.model, frame))


def test_outside_a_stream_nothing_is_kept(subject):
    converted = eventful.convert(subject.model, Config.fast(TopR(4)))
    stream = Stream(converted)
    first, second = subject.clip(2)
    subject.run(stream, first)
    for _ in range(2):
        with Resizing() as resizing:
            got = subject.run(converted, second)
        with Resizing() as expected:
            assert torch.equal(got, subject.run(subject.model, second))
        assert resizing.count == expected.count > 0
    subject.run(stream, second)


def test_gradients_reach_the_tables(subject):
    converted = eventful.convert(subject.model, Config.fast(TopR(4)))
    frame = subject.clip(1)[0]
    subject.run(Stream(converted), frame)
    found = []
    for model in (converted, subject.model):
        model.zero_grad()
        subject.entry.output(subject.entry.call(model, frame)).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def position_tables(model: nn.Module) -> list[nn.Parameter]:
    return [
        p
        for name, p in model.named_parameters()
        if any(part in name for part in ("pos", "freqs")) and "norm" not in name
    ]


def test_new_weights_bring_new_tables(subject, steps):
    stream = subject.stream(TopR(10_000))
    first, second, third = subject.clip(3)
    subject.run(stream, first)
    subject.run(stream, second)
    with torch.no_grad():
        for weight in position_tables(subject.model) or subject.model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    with pytest.raises(WeightsChangedError):
        subject.run(stream, third)
        subject.run(stream, third)
    stream.reset()
    for frame in (third, second):
        close(subject.run(stream, frame), subject.run(subject.model, frame))


def other_size(entry: Entry) -> tuple[int, int]:
    height, width = entry.size
    return width, height


def test_two_sizes_at_a_time(subject, steps):
    converted = eventful.convert(subject.model, Config.fast(TopR(10_000), fallback=False))
    sizes = (subject.entry.size, other_size(subject.entry))
    streams = [Stream(converted) for _ in sizes]
    clips = [subject.clip(3, size) for size in sizes]
    if "one_size" in str(type(subject.entry)) or not takes(subject, clips[1][0]):
        clips, streams = clips[:1] * 2, streams  # such a model has one size
    for frames in zip(*clips, strict=True):
        for stream, frame in zip(streams, frames, strict=True):
            close(subject.run(stream, frame), subject.run(subject.model, frame))


def takes(subject: Subject, frame: Tensor) -> bool:
    try:
        subject.run(subject.model, frame)
    except (AssertionError, RuntimeError):
        return False
    return True


def test_autocast(subject, steps):
    stream = subject.stream(TopR(10_000))
    for frame in subject.clip(3):
        with torch.autocast("cpu", torch.bfloat16):
            got = subject.run(stream, frame)
            expected = subject.run(subject.model, frame)
        assert got.dtype == expected.dtype
        close(got.float(), expected.float(), 0.05)
