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
from eventful.bench.dense import DenseSpec, dense_paths
from eventful.errors import WeightsChangedError
from eventful.memory.state import RowState
from eventful.models.blocks import at_size
from eventful.models.vitdet import BackboneConfig, ViTDetBackbone
from eventful.models.vivit import SpatialModel, ViViTConfig
from eventful.paper.evaluate.contenders import contender
from eventful.paper.evaluate.variants import DENSE, Variant
from eventful.rules.step import Step
from eventful.surgery.adapters.constants import SizedMethod
from eventful.surgery.session import Session
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
        monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    return request.param


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.in_turn(2)
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


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("seen", [True, False], ids=["in place", "through data"])
def test_new_weights_bring_new_tables(subject, steps, seen):
    stream = subject.stream(TopR(10_000))
    first, second, third = subject.clip(3)
    subject.run(stream, first)
    subject.run(stream, second)
    for weight in position_tables(subject.model) or subject.model.parameters():
        # Writes through `.data` do not count as a change, but a reset heeds them.
        (weight.detach() if seen else weight.data).add_(0.3 * torch.randn_like(weight))
    if seen:
        with pytest.raises(WeightsChangedError):
            subject.run(stream, third)
    stream.reset()
    for frame in (third, second):
        close(subject.run(stream, frame), subject.run(subject.model, frame))


@pytest.mark.in_turn(2)
def test_two_sizes_at_a_time(subject, steps):
    size = other_size(subject)
    if size is None:
        return  # such a model takes one size
    converted = eventful.convert(subject.model, Config.fast(TopR(10_000), fallback=False))
    streams = [Stream(converted), Stream(converted)]
    clips = [subject.clip(3), subject.clip(3, size)]
    for frames in zip(*clips, strict=True):
        for stream, frame in zip(streams, frames, strict=True):
            close(subject.run(stream, frame), subject.run(subject.model, frame))


def other_size(subject: Subject) -> tuple[int, int] | None:
    height, width = subject.entry.size
    try:
        subject.run(subject.model, subject.clip(1, (width, height))[0])
    except AssertionError:
        assert "dynamic_img_size" in dir(subject.model)
        return None
    return width, height


def test_autocast(subject, steps):
    stream = subject.stream(TopR(10_000))
    for frame in subject.clip(3):
        with torch.autocast("cpu", torch.bfloat16):
            got = subject.run(stream, frame)
            expected = subject.run(subject.model, frame)
        assert got.dtype == expected.dtype
        close(got.float(), expected.float(), 0.05)


class TestFallsBack:
    """Code that is not the library's own may depend on more than weights and sizes."""

    def test_a_subclass_that_resizes_its_own_way(self, steps):
        scale = [1.0]

        class Scaling(zoo_timm.vit.VisionTransformer):
            def _pos_embed(self, x):
                return super()._pos_embed(x) * scale[0]

        torch.manual_seed(3)
        model = zoo_timm.spread(Scaling(**zoo_timm.TINY, **DYNAMIC, patch_size=8, global_pool=""))
        stream = Stream(eventful.convert(model, Config.fast(TopR(10_000), fallback=False)))
        for frame in moving_square(3, (40, 24)):
            scale[0] *= 2
            with torch.no_grad():
                close(stream(frame), model(frame))

    def test_a_method_set_on_the_instance(self, steps):
        entry = zoo_transformers.ZOO["vit"]
        torch.manual_seed(3)
        model = entry.make()
        own, scale = model.embeddings.interpolate_pos_encoding, [1.0]
        model.embeddings.interpolate_pos_encoding = lambda *args: own(*args) * scale[0]
        stream = Subject(entry, model).stream(TopR(10_000))
        for frame in moving_square(3, entry.size):
            scale[0] *= 2
            with torch.no_grad():
                close(*(entry.output(entry.call(run, frame)) for run in (stream, model)))


class Counter(nn.Module):
    """Counts how often its method ran."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4))
        self.ran = 0

    def sized(self, *args, **kwargs) -> int:
        self.ran += 1
        return self.ran


class TestSizedMethod:
    """What a result is kept for."""

    @pytest.fixture
    def session(self):
        session = Session(Config.fast(TopR(1)))
        session.step = Step(session.config, RowState(1), [TopR(1)], [True], {})
        return session

    @pytest.fixture
    def module(self):
        return Counter()

    @pytest.mark.parametrize("other", [(3,), (2, 4), ((2, 3),), (None,), ("a",)], ids=str)
    def test_each_size_has_its_own(self, session, module, other):
        method = SizedMethod(module, "sized", session)
        assert [method(2), method(*other), method(2), method(*other)] == [1, 2, 1, 2]
        assert [method(size=2), method(size=2)] == [3, 3]

    def test_autocast_has_its_own(self, session, module):
        method = SizedMethod(module, "sized", session)
        with torch.autocast("cpu", torch.bfloat16):
            assert method(2) == 1
        with torch.autocast("cpu", torch.float16):
            assert method(2) == 2
        assert method(2) == 3
        with torch.autocast("cpu", torch.bfloat16):
            assert method(2) == 1

    def test_written_and_moved_tables_are_noticed(self, session, module):
        method = SizedMethod(module, "sized", session)
        assert method(2) == method(2) == 1
        module.table.detach().add_(1)
        assert method(2) == method(2) == 2
        module.double()
        assert method(2) == method(2) == 3

    def test_tensors(self, session, module):
        """Parameters by identity, others by size, where that is all they tell."""
        exact, shaped = (SizedMethod(module, "sized", session, flag) for flag in (False, True))
        frame, table = torch.ones(2, 3, 4), nn.Parameter(torch.ones(4))
        assert exact(table) == exact(table) == 1
        assert exact(module.table) == 2
        assert [exact(frame), exact(frame)] == [3, 4]
        assert shaped(frame) == shaped(torch.zeros(5, 3, 4)) == 5
        assert [shaped(torch.ones(2, 4, 3)), shaped(frame.double())] == [6, 7]

    def test_what_is_no_size_is_not_kept(self, session, module):
        method = SizedMethod(module, "sized", session)
        assert [method({}), method({}), method([2, {}]), method([2, {}])] == [1, 2, 3, 4]

    def test_outside_a_step(self, session, module):
        session.step = None
        method = SizedMethod(module, "sized", session)
        assert [method(2), method(2)] == [1, 2]


def subject_run(entry, runner, frame):
    with torch.no_grad():
        return entry.output(entry.call(runner, frame))


def test_copies_of_a_converted_model_keep_tables_of_their_own():
    entry = TIMM["sam_intermediates"]
    torch.manual_seed(3)
    first = eventful.convert(entry.make(), Config.fast(TopR(10_000), fallback=False))
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.pos_embed.add_(1.0)
    frame = moving_square(1, entry.size)[0]
    for model in (first, second):
        stream = Stream(model)
        for _ in range(2):
            close(subject_run(entry, stream, frame), subject_run(entry, model, frame))
    saved = io.BytesIO()
    torch.save(first, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    close(subject_run(entry, Stream(loaded), frame), subject_run(entry, first, frame))


def test_batches_of_changing_size_share_the_tables(steps):
    entry = zoo_transformers.ZOO["vit"]
    torch.manual_seed(3)
    model = entry.make()
    batch = StreamBatch(eventful.convert(model, Config.fast(TopR(10_000), fallback=False)))
    for members in (2, 3, 1):
        for name in list(batch.streams):
            batch.leave(name)
        for name in range(members):
            batch.join(str(name))
        frames = moving_square(1, entry.size, batch=members)[0]
        with Resizing() as resizing:
            got = subject_run(entry, batch, frames)
        close(got, subject_run(entry, model, frames))
        assert resizing.count == (members == 2)


def test_work_under_recording_is_not_kept(monkeypatch):
    """Its tensors hold nothing before the recording is replayed."""
    step = Step(Config.fast(TopR(1)), RowState(1), [TopR(1)], [True], {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert step.constant("table", lambda: 1) == 1
    assert step.constants == {}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert step.constant("table", lambda: 2) == 2
    assert step.constant("table", lambda: 3) == 2


class TestAtSize:
    @pytest.fixture(params=OWN)
    def entry(self, request):
        torch.manual_seed(3)
        return OWN[request.param]

    def test_same_bits_and_nothing_resized(self, entry):
        model = entry.make()
        fixed = at_size(model, entry.size)
        for size, resized in ((entry.size, False), (entry.size[::-1], True)):
            frame = moving_square(1, size)[0]
            with Resizing() as resizing:
                got = subject_run(entry, fixed, frame)
            assert torch.equal(got, subject_run(entry, model, frame))
            assert (resizing.count > 0) == resized

    def test_shares_weights_and_leaves_the_model_alone(self, entry):
        model = entry.make()
        fixed = at_size(model, entry.size)
        assert all(map(lambda a, b: a is b, model.parameters(), fixed.parameters()))
        assert fixed.state_dict().keys() == model.state_dict().keys()
        assert not list(model.buffers())
        frame = moving_square(1, entry.size)[0]
        entry.call(fixed.train(), frame).sum().backward()
        assert all(table.grad is not None for table in position_tables(model))

    def test_moves_with_the_model(self, entry):
        fixed = copy.deepcopy(at_size(entry.make(), entry.size)).double()
        frame = moving_square(1, entry.size)[0].double()
        assert subject_run(entry, fixed, frame).dtype == torch.float64

    def test_models_without_tables_are_returned_as_they_are(self):
        model = plain()()
        assert at_size(model, (32, 40)) is model

    def test_dense_baselines_resize_nothing(self, entry, monkeypatch):
        monkeypatch.setattr("eventful.bench.dense._cpu_recipes", lambda spec, found: ())
        model, frame = entry.make(), moving_square(1, (64, 64))[0]
        frame = frame[:, :, None].expand(-1, -1, 2, -1, -1) if entry.call is clip_of_two else frame
        runs = [
            contender(model, Variant("Dense", DENSE, "vitdet", options={"pool": pool}), 64)
            for pool in (1, 2)
        ]
        runs.append(dense_paths(DenseSpec(model, frame, compiled=False)).runs["eager"])
        for run in runs:
            with Resizing() as resizing:
                run(frame)
            assert resizing.count == 0
