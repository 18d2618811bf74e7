"""The adapters for transformers: the same model outside a stream, the same answers inside."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo_transformers as zoo
from eventful.config import Config
from eventful.errors import UnsupportedError
from eventful.policies import TopR
from eventful.rules.block import run_block
from eventful.stream import Stream, StreamBatch
from eventful.surgery import conversion
from eventful.surgery.conversion import convert, inspect, restore
from tolerances import assert_near, limit
from zoo_transformers import ZOO, Entry

EVERY = 10_000  # more tokens than any of the models has
# Models whose call takes output_hidden_states and returns tokens, or a grid of them, per layer.
DEEP = [name for name in ZOO if "backbone" not in name]


def frames(entry: Entry, count: int = 4, change: float = 1.0, batch: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)

    def noise() -> Tensor:
        return torch.randn(batch, 3, *entry.size, generator=generator)

    first = noise()
    return [first + change * noise() for _ in range(count)]


@functools.cache
def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ZOO[name].make()


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def tensors(result: Any) -> Iterator[Tensor]:
    """Every tensor of a model's output, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from tensors(value)
    elif isinstance(result, tuple | list):
        for value in result:
            yield from tensors(value)


def assert_same(result: Any, wanted: Any, *, exactly: bool = False) -> None:
    assert type(result) is type(wanted)
    pairs = list(zip(tensors(result), tensors(wanted), strict=True))
    assert pairs
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
        if exactly:
            assert torch.equal(mine, theirs)
        else:
            assert_near(mine, theirs)


def hidden(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **options: run(**options, output_hidden_states=True)


@torch.no_grad()
def dense(model: nn.Module, entry: Entry, frame: Tensor) -> Any:
    return entry.call(model, frame)


@torch.no_grad()
def states(model: nn.Module, entry: Entry, frame: Tensor) -> tuple[Tensor, ...]:
    return entry.call(hidden(model), frame).hidden_states


def as_tokens(state: Tensor) -> Tensor:
    """(B, N, D) from what a layer returns; D is 32 and no grid is as wide."""
    if state.dim() == 3:
        return state
    return state.flatten(1, 2) if state.shape[-1] == 32 else state.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("name", ZOO)
def test_every_block_matches(name: str) -> None:
    found = inspect(made(name), ZOO[name].size)
    assert found.matched == len(found.blocks) == 3
    assert inspect(made(name)).size is not None


@pytest.mark.parametrize("name", ZOO)
def test_the_whole_result_is_the_models(name: str) -> None:
    """Its type and every tensor in it, not the last hidden state alone."""
    model, entry = made(name), ZOO[name]
    converted = convert(model, Config.fast(TopR(EVERY)))
    stream = Stream(converted)
    for frame in frames(entry, 2):
        wanted = dense(model, entry, frame)
        assert_same(entry.call(stream, frame), wanted)
        assert_same(dense(converted, entry, frame), wanted, exactly=True)


def _options(entry: Entry) -> dict[str, Any]:
    return {"interpolate_pos_encoding": True} if entry.call is zoo.interpolated else {}


@pytest.mark.parametrize("preset", ["fast", "exact", "paper"])
@pytest.mark.parametrize("name", ZOO)
def test_some_tokens_come_close(name: str, preset: str) -> None:
    model, entry = made(name), ZOO[name]
    stream = Stream(convert(model, Config.preset(preset, TopR(12))))
    for frame in frames(entry, 3, change=0.05):
        wanted = dense(model, entry, frame)
        result = entry.call(stream, frame)
        assert type(result) is type(wanted)
        error = (entry.output(result) - entry.output(wanted)).abs().max()
        assert error < 0.3 * entry.output(wanted).abs().max()


@pytest.mark.parametrize("name", ["vit", "dinov3", "yolos", "vitdet", "sam_encoder"])
def test_ragged_streams(name: str) -> None:
    """A stream that updates everything is dense even if its neighbour updates three tokens."""
    model, entry = made(name), ZOO[name]
    batch = StreamBatch(convert(model, Config.fast(scene_cut=None, max_age=None)))
    batch.join("all", TopR(EVERY))
    batch.join("few", TopR(3))
    for frame in frames(entry, 3, batch=2):
        result = entry.output(batch(frame, **_options(entry)))
        wanted = entry.output(dense(model, entry, frame))
        assert_same(result[0], wanted[0])


@pytest.mark.parametrize("name", ZOO)
def test_what_changed_is_right_where_attention_carries_no_change(name: str) -> None:
    """With attention only in the last layer, the selected tokens must equal dense ones.

    This is what tells a token's position apart from its place in the selection: rotary and
    relative position, position embeddings between layers, windows.
    """
    entry = ZOO[name]
    model = fresh(entry.make)
    _silence_attention(model)
    converted = convert(model, Config.fast(TopR(14), max_age=None, scene_cut=None))
    stream = Stream(converted, maps=True)
    first = frames(entry, 1)[0]
    second = first.clone()
    second[..., 8:16, 8:24] += 1.0
    second[..., 16:24, -8:] -= 1.0
    mine, theirs = _last_layer(converted), _last_layer(model)
    for frame in (first, second):
        entry.call(stream, frame)
        dense(model, entry, frame)
    mask = stream.last.mask  # type: ignore[union-attr]
    assert 3 <= mask.sum() <= 14 + _special(stream)
    assert_same(mine[1][mask], theirs[1][mask])
    assert (theirs[1][mask] - theirs[0][mask]).abs().max() > 0.1


def _special(stream: Stream) -> int:
    """Class, register and detection tokens, which come on top of r."""
    (layout,) = stream.last.layouts.values()  # type: ignore[union-attr]
    return layout.prefix + layout.suffix


def _last_layer(model: nn.Module) -> list[Tensor]:
    """A list that will hold the last layer's output (B, N, D) of every call."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(as_tokens(output[0] if isinstance(output, tuple) else output))

    _layer(model, 2).register_forward_hook(keep)
    return seen


def _layer(model: nn.Module, index: int) -> nn.Module:
    ends = (f"layer.{index}", f"layers.{index}")
    return next(module for name, module in model.named_modules() if name.endswith(ends))


@torch.no_grad()
def _silence_attention(model: nn.Module) -> None:
    """Let attention output nothing, except in the last layer."""
    names = ("o_proj", "out_proj", "attention.output.dense", "attention.proj", "attn.proj")
    found = [m for n, m in model.named_modules() if n.endswith(names) and "head" not in n]
    assert len(found) == 3
    for module in found[:-1]:
        for weight in module.parameters():
            weight.zero_()


@pytest.mark.parametrize("name", ["vit", "dinov2_backbone", "dinov3", "yolos", "vitdet"])
def test_restore(name: str) -> None:
    entry = ZOO[name]
    model = fresh(entry.make)
    before = [set(vars(module)) for module in model.modules()]
    frame = frames(entry, 1)[0]
    wanted = dense(model, entry, frame)
    convert(model, Config.fast(TopR(4)), inplace=True)
    entry.call(Stream(model), frame)
    assert restore(model) is model
    assert [set(vars(module)) for module in model.modules()] == before
    assert_same(dense(model, entry, frame), wanted, exactly=True)


@pytest.mark.parametrize("name", ["dinov2_backbone", "dinov3", "yolos", "sam_encoder"])
def test_a_copy_has_its_own_blocks(name: str) -> None:
    model, entry = made(name), ZOO[name]
    copied = copy.deepcopy(convert(model, Config.fast(TopR(EVERY))))
    with torch.no_grad():
        for weight in copied.parameters():
            weight.mul_(0.9)
    for frame in frames(entry, 2):
        assert_same(entry.call(Stream(copied), frame), dense(copied, entry, frame))


@pytest.mark.parametrize("name", DEEP)
def test_hidden_states_are_whole(name: str) -> None:
    """Asked for always, now and then, or never: the same hidden states and the same output."""
    model, entry = made(name), ZOO[name]
    config = Config.fast(TopR(8), scene_cut=None)
    always, sometimes, never = (Stream(convert(model, config)) for _ in range(3))
    for i, frame in enumerate(frames(entry, 4, change=0.2)):
        wanted = states(model, entry, frame)
        told = entry.call(hidden(always), frame)
        assert [state.shape for state in told.hidden_states] == [s.shape for s in wanted]
        assert_same(told.hidden_states[0], wanted[0])
        output = entry.output(entry.call(never, frame))
        assert_same(entry.output(told), output)
        if i in (0, 3):
            again = entry.call(hidden(sometimes), frame)
            assert_same(again, told)
        else:
            assert entry.call(sometimes, frame).get("hidden_states") is None


@pytest.mark.parametrize("name", DEEP)
def test_hidden_states_from_mid_stream(name: str) -> None:
    """A layer that nobody looked at before has no buffer, so the frame is computed anew."""
    model, entry = made(name), ZOO[name]
    stream = Stream(convert(model, Config.fast(TopR(8), scene_cut=None)))
    clip = frames(entry, 3, change=0.2)
    entry.call(stream, clip[0])
    result = entry.call(hidden(stream), clip[1])
    assert stream.last is not None
    assert stream.last.flushed == [True]
    assert_same(result.hidden_states, states(model, entry, clip[1]))
    entry.call(hidden(stream), clip[2])
    assert stream.last.flushed == [False]


@pytest.mark.parametrize(
    "name", ["vit", "dinov2", "clip_vision", "depth_anything", "vitdet_backbone"]
)
def test_only_layers_that_are_seen_are_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between layers that nobody looks at only the selected tokens travel."""
    entry = ZOO[name]
    model = convert(fresh(entry.make), Config.fast(TopR(6), scene_cut=None, max_age=None))
    widths: list[tuple[int, ...]] = []

    def spy(spec: Any, step: Any, tokens: Tensor, positions: Any) -> Tensor:
        if spec.index in (1, 2):
            widths.append(tokens.shape[1:])
        return run_block(spec, step, tokens, positions)

    monkeypatch.setattr(conversion, "run_block", spy)
    stream = Stream(model)
    clip = frames(entry, 3, change=0.2)
    entry.call(hidden(stream), clip[0])
    entry.call(stream, clip[1])
    widths.clear()
    entry.call(stream, clip[2])
    tapped = name in ("depth_anything", "vitdet_backbone")  # both hand out stage 1
    passed = (6 + _special(stream), 32)
    assert (widths[0] == passed) is not tapped
    assert widths[1] == passed


def test_some_hidden_states() -> None:
    model, entry = made("dinov2"), ZOO["dinov2"]
    stream = Stream(convert(model, Config.fast(TopR(6), scene_cut=None)))
    for frame in frames(entry, 2, change=0.2):
        found = stream(pixel_values=frame, output_hidden_states=[1]).hidden_states
        assert [state is None for state in found] == [True, False, True]
        assert found[1].shape == (1, 19, 32)


HEADS: dict[str, tuple[Callable[..., nn.Module], tuple[int, int]]] = {
    "ViTForImageClassification": (
        zoo.model("ViTForImageClassification", "ViTConfig", **zoo.MLP),
        (32, 32),
    ),
    "DeiTForImageClassificationWithTeacher": (
        zoo.model("DeiTForImageClassificationWithTeacher", "DeiTConfig", **zoo.MLP),
        (32, 32),
    ),
    "Dinov2ForImageClassification": (
        zoo.model("Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2),
        (32, 40),
    ),
    "YolosForObjectDetection": (
        lambda: zoo.build("YolosForObjectDetection", zoo.yolos_config()),
        (40, 32),
    ),
    "DepthAnythingForDepthEstimation": (zoo.depth_anything, (32, 40)),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str) -> None:
    make, size = HEADS[name]
    model, entry = fresh(make), Entry(make, size)
    stream = Stream(convert(model, Config.fast(TopR(EVERY))))
    for frame in frames(entry, 2):
        assert_same(stream(frame), dense(model, entry, frame))


def test_clip_image_features_and_text() -> None:
    model = fresh(zoo.clip_model)
    found = inspect(model)
    assert [block.name for block in found.blocks] == [
        f"vision_model.encoder.layers.{i}" for i in range(3)
    ]
    converted = convert(model, Config.fast(TopR(EVERY)))
    features, whole = Stream(converted), Stream(converted)
    words = torch.tensor([[1, 2, 49, 0], [3, 49, 0, 0]])
    text = {"input_ids": words, "attention_mask": (words != 0).long()}
    for frame in frames(ZOO["clip_vision"], 2):
        with torch.no_grad():
            wanted = model.get_image_features(pixel_values=frame)
            pair = model(pixel_values=frame, **text)
        assert_same(features.call("get_image_features", pixel_values=frame), wanted)
        assert_same(whole(pixel_values=frame, **text), pair)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sam_with_prompts(attention: str) -> None:
    model = fresh(lambda: zoo.sam_model(attn_implementation=attention))
    stream = Stream(convert(model, Config.fast(TopR(EVERY))))
    points = torch.tensor([[[[10.0, 20.0], [30.0, 5.0]]]])
    for frame in frames(ZOO["sam_encoder"], 2):
        with torch.no_grad():
            wanted = model(pixel_values=frame, input_points=points)
        assert_same(stream(pixel_values=frame, input_points=points), wanted)


TWO_WAYS = [n for n in ZOO if not n.startswith(("vitdet", "depth_anything"))]


@pytest.mark.parametrize("name", TWO_WAYS)
def test_eager_attention(name: str) -> None:
    """The other tests run with SDPA."""
    entry = ZOO[name]
    assert made(name).config._attn_implementation == "sdpa"
    model = fresh(lambda: entry.make(attn_implementation="eager"))  # type: ignore[call-arg]
    stream = Stream(convert(model, Config.fast(TopR(EVERY))))
    for frame in frames(entry, 2):
        assert_same(entry.call(stream, frame), dense(model, entry, frame))


def test_masks_are_refused() -> None:
    """Of the plain models only some take a mask; what reaches a layer is what counts."""
    stream = Stream(convert(made("vit_own_size"), Config.fast(TopR(4))))
    mask = torch.ones(1, 17)
    mask[0, -1] = 0
    with pytest.raises(UnsupportedError, match="attention_mask"):
        stream(pixel_values=frames(ZOO["vit_own_size"], 1)[0], attention_mask=mask)


@pytest.mark.parametrize("name", ["dinov2", "sam_encoder", "vitdet"])
def test_attention_maps_are_refused(name: str) -> None:
    """Also where a nested config asks for them and no argument does."""
    entry = ZOO[name]
    if name == "vitdet":
        model = zoo.build("VitDetModel", zoo.vitdet_config())
        holder = model
    else:
        model = fresh(lambda: entry.make(attn_implementation="eager"))  # type: ignore[call-arg]
        holder = model.encoder if name == "dinov2" else model.vision_encoder
    stream = Stream(convert(model, Config.fast(TopR(4))))
    frame = frames(entry, 1)[0]
    entry.call(stream, frame)
    with pytest.raises(UnsupportedError, match="output_attentions"):
        stream(pixel_values=frame, output_attentions=True)
    holder.config = copy.deepcopy(holder.config)
    holder.config.output_attentions = True
    stream = Stream(convert(model, Config.fast(TopR(4))))
    with pytest.raises(UnsupportedError, match="output_attentions"):
        entry.call(stream, frame)


def test_vitdet_with_residual_blocks() -> None:
    """Blocks that end in a convolution are left alone, with a reason; the others convert."""
    model = zoo.build("VitDetModel", zoo.vitdet_config(residual_block_indices=[1]))
    entry = ZOO["vitdet"]
    found = inspect(model)
    assert [block.matched for block in found.blocks] == [True, False, True]
    assert "convolution" in (found.blocks[1].reason or "")
    with pytest.raises(UnsupportedError, match=r"encoder\.layer\.1"):
        convert(model, Config.fast(TopR(4)))
    for config in (Config.exact(TopR(EVERY)), Config.fast(TopR(EVERY), gating="block")):
        stream = Stream(convert(model, config))
        for frame in frames(entry, 2):
            assert_same(entry.call(stream, frame), dense(model, entry, frame))


def test_a_replaced_forward_is_no_match() -> None:
    model = fresh(ZOO["vit"].make)
    attention = _layer(model, 1).attention
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)
    found = inspect(model).blocks
    assert [block.matched for block in found] == [True, False, True]
    assert "replaced" in (found[1].reason or "")


def test_dinov3_in_bfloat16() -> None:
    model, entry = fresh(ZOO["dinov3"].make).bfloat16(), ZOO["dinov3"]
    stream = Stream(convert(model, Config.fast(TopR(EVERY))))
    for frame in frames(entry, 2):
        result = entry.output(entry.call(stream, frame.bfloat16()))
        wanted = entry.output(dense(model, entry, frame.bfloat16()))
        assert result.dtype == torch.bfloat16
        assert_near(result, wanted)
        assert (result - wanted).abs().max() <= limit("model", torch.bfloat16)  # small ones too
