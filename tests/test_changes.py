"""Changes of a model under a live stream: noticed where they matter, and only there."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import eventful
import zoo_timm
import zoo_transformers
from clips import moving_square
from eventful import Config, TopR, errors
from eventful.engine.probe import Probe
from guarding import ENTRY, HomeMade, PeftLike, adapted, clip, model, refused  # noqa: F401


def started(model, clip):
    """A stream that has seen a frame."""
    stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(10**6))))
    stream(clip[0])
    return stream


def starts_over(stream, frame):
    """After a reset the stream computes what the model does."""
    stream.reset()
    with torch.no_grad():
        expected = stream.model(frame)
    assert (stream(frame) - expected).abs().max() <= 1e-5 * expected.abs().max()


class TestAdapters:
    """Low-rank adapters that are switched off, scaled, chosen or merged."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: setattr(m.blocks[1].mlp.fc1, "_disable_adapters", True),
            lambda m: m.blocks[1].mlp.fc1.scaling.update(default=0.5),
            lambda m: setattr(m.blocks[1].mlp.fc1, "_active_adapter", "other"),
            lambda m: setattr(m.blocks[1].mlp.fc1, "_active_adapter", ["default", "other"]),
            lambda m: m.blocks[1].mlp.fc1.merge(),
        ],
        ids=["disable", "scaling", "choose", "choose both", "merge"],
    )
    def test_of_a_library(self, model, clip, change):
        stream = started(adapted(model, PeftLike), clip)
        change(stream.model)
        refused(stream, errors.WeightsChangedError, clip[1], r"blocks\.1\.mlp\.fc1|weights")
        starts_over(stream, clip[1])

    @pytest.mark.parametrize(
        "change",
        [
            lambda lora: setattr(lora, "scale", 0.0),
            lambda lora: setattr(lora, "enabled", False),  # hides an attribute of the class
        ],
        ids=["scale", "enabled"],
    )
    def test_home_made(self, model, clip, change):
        stream = started(adapted(model, HomeMade), clip)
        change(stream.model.blocks[0].mlp.fc1)
        refused(stream, errors.WeightsChangedError, clip[1], r"blocks\.0\.mlp\.fc1.*stream\.reset")
        starts_over(stream, clip[1])

    def test_what_is_changed_back_between_frames_does_not_matter(self, model, clip):
        stream = started(adapted(model, HomeMade), clip)
        lora = stream.model.blocks[0].mlp.fc1
        lora.scale = 0.0
        refused(stream, errors.WeightsChangedError, clip[1])
        lora.scale = 1.0
        stream(clip[1])

    def test_a_snapshot_belongs_to_the_settings_it_was_taken_with(self, model, clip):
        stream = started(adapted(model, HomeMade), clip)
        data = stream.snapshot()
        stream.model.blocks[0].mlp.fc1.scale = 0.25
        with pytest.raises(errors.SnapshotError, match=r"fc1\.scale = 1\.0, the model has 0\.25"):
            eventful.Stream.load(stream.model, data)
        stream.model.blocks[0].mlp.fc1.scale = 1.0
        eventful.Stream.load(stream.model, data)(clip[1])


class Clamp(nn.Module):
    def __init__(self):
        super().__init__()
        self.most = 0.1

    def forward(self, weight):
        return weight.clamp(-self.most, self.most)


class TestSettings:
    @pytest.mark.parametrize(
        "change",
        [
            lambda m: setattr(m.norm, "eps", 0.5),
            lambda m: setattr(m.blocks[0].attn, "scale", 0.01),
            lambda m: setattr(m.blocks[0].mlp.fc1.parametrizations.weight[0], "most", 0.05),
            lambda m: setattr(m.blocks[0].mlp.act, "approximate", "tanh"),
            lambda m: setattr(m.blocks[2].mlp, "act", nn.ReLU().eval()),
            lambda m: setattr(m.blocks[2].mlp.fc2, "forward", torch.zeros_like),
            lambda m: setattr(m.blocks[2].mlp, "__class__", nn.Identity),
            lambda m: parametrize.remove_parametrizations(m.blocks[0].mlp.fc1, "weight"),
            lambda m: m.blocks[1].mlp.to(torch.bfloat16).to(torch.float32),
            lambda m: m.blocks[1].drop_path1.register_parameter("p", nn.Parameter(torch.ones(1))),
        ],
        ids=[
            *("eps", "attention scale", "parametrization", "string", "module", "forward", "class"),
            *("parametrization removed", "dtype", "new parameter"),
        ],
    )
    def test_that_matter(self, model, clip, change):
        parametrize.register_parametrization(model.blocks[0].mlp.fc1, "weight", Clamp())
        model.eval()
        stream = started(model, clip)
        change(stream.model)
        refused(stream, errors.WeightsChangedError, clip[1], r"stream\.reset")

    def test_a_patched_class(self, model, clip, monkeypatch):
        stream = started(model, clip)
        monkeypatch.setattr(nn.GELU, "forward", lambda self, x: x)
        refused(stream, errors.WeightsChangedError, clip[1], r"stream\.reset")
        starts_over(stream, clip[1])

    @pytest.mark.parametrize(
        "change",
        [
            lambda blocks: blocks.__setitem__(1, copy.deepcopy(ENTRY.make().blocks[1])),
            lambda blocks: blocks.insert(0, blocks.pop(1)),
            lambda blocks: blocks.__delitem__(2),
            lambda blocks: blocks.append(copy.deepcopy(ENTRY.make().blocks[1])),
        ],
        ids=["replaced", "exchanged", "removed", "added"],
    )
    def test_other_blocks_need_another_conversion(self, model, clip, change):
        stream = started(model, clip)
        change(stream.model.blocks)
        refused(stream, errors.WeightsChangedError, clip[1])
        stream.reset()
        with pytest.raises(errors.WeightsChangedError, match=r"eventful\.convert again"):
            stream(clip[1])

    def test_another_scale_of_the_attention_is_used_after_a_reset(self, clip):
        stream = started(zoo_timm.ZOO["vit_unfused"].make(), clip)
        for block in stream.model.blocks:
            block.attn.scale = 0.01
        starts_over(stream, clip[1])

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.requires_grad_(False),
            lambda m: m.blocks[0].requires_grad_(False),
            lambda m: m.set_grad_checkpointing(True),
            lambda m: setattr(m.blocks[0].attn, "fused_attn", False),
            lambda m: setattr(m, "_is_hf_initialized", True),
            lambda m: setattr(m.blocks[0], "notes", object()),
            lambda m: m.train().eval(),
            lambda m: m.blocks[0].register_full_backward_hook(lambda *_: None),
            lambda m: m.norm.register_forward_hook(lambda *_: None),
            lambda m: m.zero_grad(),
        ],
        ids=[
            *("frozen", "frozen block", "checkpointing", "fused", "initialised", "an object"),
            *("mode and back", "backward hook", "forward hook", "gradients"),
        ],
    )
    def test_that_do_not(self, model, clip, change):
        stream = started(model, clip)
        change(stream.model)
        stream(clip[1])

    def test_outside_the_trunk_are_free(self, model, clip):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.vit, self.gain = model, 1.0

            def forward(self, x):
                return self.gain * self.vit(x)

        stream = started(Scaled().eval(), clip)
        before = stream(clip[1])
        stream.model.gain = 2.0
        assert torch.equal(stream(clip[1]), 2 * before)

    def test_a_further_input_may_be_handed_in_as_an_attribute(self, model, clip):
        class Prompted(type(model)):
            def forward(self, x):
                return super().forward(x + self.prompt)

        model.__class__ = Prompted
        model.prompt = torch.zeros(())
        stream = started(model, clip)
        view = stream._weights.known
        for frame, value in zip(clip[1:4], (0.5, 0.25, 0.0), strict=True):
            stream.model.prompt = torch.tensor(value)
            stream(frame)
        assert stream._weights.known is view

    def test_what_a_forward_changes_itself_is_its_own_business(self, model, clip):
        class Counting(type(model)):
            calls, table, size = 0, None, None

            def forward(self, x):
                self.calls += 1
                self.table = torch.zeros(3)
                self.seen.add_(1)
                self.size = tuple(x.shape[-2:])
                return super().forward(x)

        model.__class__ = Counting
        model.register_buffer("seen", torch.zeros(()), persistent=False)
        stream = started(model, clip)
        for frame in clip[1:3]:
            stream(frame)
            with torch.no_grad():
                stream.model(frame[..., :40])
        other = eventful.Stream(stream.model)
        other(clip[0])
        stream(clip[3])
        stream.model.norm.eps = 0.5
        refused(stream, errors.WeightsChangedError, clip[4])


class TestBuffers:
    @pytest.fixture
    def with_buffer(self, model):
        model.blocks[0].mlp.norm = nn.BatchNorm1d(20 + 1).eval()  # over the tokens: all of them run
        model.blocks[0].mlp.norm.table = torch.ones(4)  # a tensor that is not registered
        return model

    @pytest.mark.parametrize(
        "change",
        [
            lambda norm: norm.running_mean.add_(1),
            lambda norm: norm.running_mean.data.add_(1),
            lambda norm: setattr(norm, "running_mean", torch.ones(21)),
            lambda norm: setattr(norm.running_mean, "data", torch.zeros(21)),
            lambda norm: norm.register_buffer("more", torch.ones(1)),
            lambda norm: norm.table.add_(1),
            lambda norm: norm.table.data.add_(1),
        ],
        ids=["write", "data write", "replaced", "data", "new", "attribute", "attribute's data"],
    )
    def test_are_watched(self, with_buffer, clip, change):
        stream = started(with_buffer, clip)
        change(stream.model.blocks[0].mlp.norm)
        refused(stream, errors.WeightsChangedError, clip[1], r"stream\.reset")


class TestProbe:
    @pytest.mark.parametrize(
        "name", ["blocks.1.mlp.fc1.weight", "blocks.2.norm1.bias", "pos_embed"]
    )
    @pytest.mark.parametrize("through", ["original", "converted"])
    def test_writes_past_the_version_counter(self, model, clip, name, through):
        stream = started(model, clip)
        weight = (model if through == "original" else stream.model).get_parameter(name)
        version = weight._version
        weight.data.mul_(1.01)
        assert weight._version == version
        refused(stream, errors.WeightsChangedError, clip[1], r"stream\.reset")
        starts_over(stream, clip[1])

    def test_nan_equals_itself(self):
        weights = [torch.full((50,), float("nan")), torch.arange(3.0)]
        probe = Probe(weights)
        before = probe.values()
        assert not probe.changed(before)
        assert not any(map(bool, probe.difference(before)))
        weights[1].data[1] = -1
        assert probe.changed(before)
        assert any(map(bool, probe.difference(before)))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.randn(40, 30),
            lambda: torch.randn(40, 30).t(),
            lambda: torch.randn(40, 30)[::2, 3:9],
            lambda: torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
            lambda: torch.randn(5, 6, dtype=torch.complex64),
            lambda: torch.randn(7, 8, dtype=torch.bfloat16),
            lambda: torch.randn(7, 8, dtype=torch.float64),
            lambda: torch.randn(9, 9).to(torch.float8_e4m3fn),
            lambda: torch.tensor(3.0),
            lambda: torch.ones(30, dtype=torch.bool),
            lambda: torch.randn(12, 1)[:, :0],
        ],
    )
    def test_any_layout(self, make):
        tensor = make()
        probe = Probe([tensor, torch.ones(3)])
        before = probe.values()
        tensor.data.copy_(torch.zeros(tensor.shape).to(tensor.dtype))
        assert probe.changed(before) == (tensor.numel() > 0)

    def test_reads_few_elements_in_few_pieces(self, model):
        probe = Probe(list(model.parameters()))
        assert [v.dtype for v in probe.values()] == [torch.int32]
        assert probe.values()[0].numel() <= 8 * len(list(model.parameters()))

    def test_lets_go_of_replaced_weights(self, model, clip):
        stream = started(model, clip)
        old = weakref.ref(model.blocks[0].norm1.weight)
        storage = weakref.ref(model.blocks[0].norm1.weight.untyped_storage())
        model.blocks[0].norm1.weight = nn.Parameter(torch.ones(model.embed_dim))
        for _ in range(2):
            with pytest.raises(errors.WeightsChangedError):
                stream(clip[1])
        gc.collect()
        assert old() is None
        assert storage() is None

    def test_written_before_a_move(self, model, clip):
        stream = started(model, clip)
        stream.to("cpu")
        stream(clip[1])
        model.blocks[0].norm1.weight.data.mul_(2)
        with pytest.raises(errors.WeightsChangedError):
            stream.to("cpu")


class TestOriginal:
    @pytest.mark.parametrize(
        "change",
        [
            lambda m: setattr(m.blocks[1], "mlp", nn.Identity()),
            lambda m: setattr(m.blocks[1].mlp, "act", nn.ReLU().eval()),
            lambda m: parametrize.register_parametrization(m.blocks[0].mlp.act, "p", nn.Identity()),
            lambda m: m.add_module("more", nn.Identity()),
            lambda m: delattr(m, "fc_norm"),
            lambda m: adapted(m, HomeMade),
        ],
        ids=["block", "leaf", "parametrization", "more", "fewer", "adapters"],
    )
    def test_a_module_replaced_on_the_original(self, model, clip, change):
        model.blocks[0].mlp.act.p = nn.Parameter(torch.ones(1))
        stream = started(model, clip)
        change(model)
        refused(stream, errors.WeightsChangedError, clip[1], r"eventful\.convert again")
        stream.reset()
        with pytest.raises(errors.WeightsChangedError, match="original"):
            stream(clip[1])

    def test_converting_again_uses_it(self, model, clip):
        stream = started(model, clip)
        model.blocks[1].mlp.act = nn.ReLU().eval()
        refused(stream, errors.WeightsChangedError, clip[1])
        starts_over(started(model, clip), clip[1])

    def test_is_not_kept_alive(self, model, clip):
        whole = nn.Sequential(model).eval()
        stream = eventful.Stream(eventful.convert(whole, Config.fast(TopR(4))))
        stream(clip[0])
        gone = weakref.ref(whole)
        del whole
        gc.collect()
        assert gone() is None
        stream(clip[1])
        model.blocks[1].mlp = nn.Identity()  # the part that is still there is watched
        refused(stream, errors.WeightsChangedError, clip[2], "original")

    def test_in_place_there_is_none(self, model, clip):
        stream = eventful.Stream(eventful.convert(model, Config.fast(TopR(4)), inplace=True))
        stream(clip[0])
        model.blocks[1].mlp.act = nn.ReLU().eval()
        refused(stream, errors.WeightsChangedError, clip[1], r"stream\.reset")
        starts_over(stream, clip[1])

    def test_a_copy_has_no_original(self, model, clip):
        converted = copy.deepcopy(eventful.convert(model, Config.fast(TopR(10**6))))
        stream = eventful.Stream(converted)
        stream(clip[0])
        model.blocks[1].mlp = nn.Identity()
        stream(clip[1])


@pytest.mark.parametrize("name", [*zoo_timm.ZOO, *(f"hf:{n}" for n in zoo_transformers.ZOO)])
def test_no_family_trips(name):
    """Models of every family change nothing about themselves that a stream would notice."""
    zoo = zoo_transformers.ZOO if name.startswith("hf:") else zoo_timm.ZOO
    entry = zoo[name.removeprefix("hf:")]
    torch.manual_seed(0)
    converted = eventful.convert(entry.make(), Config.fast(TopR(4)))
    stream = eventful.Stream(converted)
    for frame in moving_square(3, entry.size, noise=0.05):
        entry.call(stream, frame)
        with torch.no_grad():
            entry.call(converted, frame)
    assert not stream._session.volatile
