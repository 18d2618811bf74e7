"""The timm and torchvision adapters, on tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eventful
from clips import moving_square
from eventful import Config, Threshold, TopR
from eventful.errors import NoMatchError, UnsupportedError
from eventful.surgery.conversion import BlockForward, find_session
from eventful.surgery.libraries import load
from tolerances import assert_near
from zoo_timm import (
    FRAME,
    TINY,
    ZOO,
    Entry,
    eva,
    make,
    named,
    plain,
    rotary,
    run,
    sam,
    spread,
    stream_of,
    timm,
    vit,
)

PRESETS = ("fast", "exact", "paper", "tokenwise", "stgt")
EVERYTHING = TopR(10**6)


def assert_dense(entry: Entry, model: nn.Module, config: Config, noise: float = 0.1) -> None:
    stream = stream_of(model, config)
    for frame in moving_square(4, entry.size, batch=2, noise=noise):
        assert_near(run(entry, stream, frame), run(entry, model, frame))


def specs_of(converted: nn.Module) -> list[Any]:
    forwards = [vars(module).get("forward") for module in converted.modules()]
    return [forward.spec for forward in forwards if isinstance(forward, BlockForward)]


@pytest.fixture(params=ZOO)
def entry(request: pytest.FixtureRequest) -> Entry:
    return ZOO[request.param]


def test_all_blocks_match(entry: Entry) -> None:
    found = eventful.inspect(make(entry), entry.size)
    assert [block.reason for block in found.blocks] == [None] * 3
    assert all(bytes_ > 0 for bytes_ in found.state_bytes.values())


def test_frame_size_is_known(entry: Entry) -> None:
    found = eventful.inspect(make(entry))
    assert found.size is not None
    assert min(found.tokens.values()) > 8


@pytest.mark.parametrize("preset", ["exact", "tokenwise"])
def test_any_change_is_followed(entry: Entry, preset: str) -> None:
    """Few tokens pass the first gate, in no regular order, and the output is still dense."""
    assert_dense(entry, make(entry), Config.preset(preset, Threshold(1e-6)), noise=0.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_few_tokens_run(entry: Entry, preset: str) -> None:
    model = make(entry)
    # On so few tokens following their context costs more than they do.
    options = {"context": None} if preset == "fast" else {}
    config = Config.preset(preset, TopR(8), protect=False, max_age=None, **options)
    stream = stream_of(model, config)
    for frame in moving_square(4, entry.size, batch=2, noise=0.1):
        out = run(entry, stream, frame)
        assert torch.isfinite(out).all()
    assert stream.last is not None
    assert set(stream.last.updated.values()) == {8.0}
    assert stream.last.macs < stream.last.dense_macs


def test_maps_are_token_wise(entry: Entry) -> None:
    """q, k and v of some tokens are those rows of all tokens' q, k and v: rotation included."""
    converted = eventful.convert(make(entry))
    calls: list[tuple[Any, Any]] = []
    specs = specs_of(converted)
    _, adapter = find_session(converted).trunks[specs[0].trunk]
    for spec in specs:
        spec.module.register_forward_pre_hook(
            lambda block, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
    (frame,) = moving_square(1, entry.size, batch=2)
    run(entry, converted, frame)
    for spec, (args, kwargs) in zip(specs, calls, strict=True):
        call = adapter.read(spec, args, kwargs)
        count = call.tokens.shape[1]
        everything = torch.arange(count).expand(2, count)
        some = torch.stack([torch.randperm(count)[:7] for _ in range(2)])
        tokens = spec.norm1(call.tokens)
        rows = tokens.gather(1, some[..., None].expand(-1, -1, tokens.shape[2]))
        whole = spec.qkv(tokens, everything, call.positions)
        for part, full in zip(spec.qkv(rows, some, call.positions), whole, strict=True):
            assert part.shape == (2, 7, spec.heads * spec.head_dim)
            expected = full.gather(1, some[..., None].expand(-1, -1, full.shape[2]))
            torch.testing.assert_close(part, expected)


def test_restore_undoes_conversion(entry: Entry) -> None:
    model = make(entry)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    (frame,) = moving_square(1, entry.size)
    expected = run(entry, model, frame)
    assert eventful.convert(model, inplace=True) is model
    run(entry, eventful.Stream(model), frame)
    eventful.restore(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(run(entry, model, frame), expected)


def test_hooks_see_all_tokens(entry: Entry) -> None:
    model = make(entry)
    converted = eventful.convert(model, Config.fast(TopR(8), scene_cut=None))
    stream = eventful.Stream(converted)
    seen: dict[str, list[Tensor]] = {"dense": [], "stream": []}

    def watch(source: nn.Module, where: str) -> Any:
        names = eventful.inspect(model, entry.size).blocks
        block = source.get_submodule(names[1].name)
        return block.register_forward_hook(lambda block, args, out: seen[where].append(out))

    handles = [watch(model, "dense"), watch(converted, "stream")]
    for t, frame in enumerate(moving_square(4, entry.size, noise=0.1)):
        stream.policy = EVERYTHING if t < 3 else TopR(8)
        run(entry, model, frame)
        run(entry, stream, frame)
        got, expected = seen["stream"][-1], seen["dense"][-1]
        assert got.shape == expected.shape
        if t < 3:
            assert_near(got, expected)
    for handle in handles:
        handle.remove()
    run(entry, stream, frame)
    assert len(seen["stream"]) == 4


def with_separate_bias() -> nn.Module:
    model = rotary()()
    for block in model.blocks:
        block.attn.qkv_bias_separate = True
    return model


def without_fusion(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = make_model()
        for block in model.blocks:
            block.attn.fused_attn = False
        return model

    return build


VARIANTS: dict[str, Entry] = {
    "classifier": Entry(plain(global_pool="token")),
    "average": Entry(plain(global_pool="avg", class_token=False)),
    "map": Entry(plain(global_pool="map", class_token=False)),
    "patch drop": Entry(plain(patch_drop_rate=0.5)),
    "no position": Entry(plain(pos_embed="none")),
    "padded": Entry(plain(dynamic_img_size=True, dynamic_img_pad=True), (30, 45)),
    "pre norm": Entry(plain(pre_norm=True, scale_mlp_norm=True)),
    "rotary patch drop": Entry(rotary(patch_drop_rate=0.5)),
    "rotary dynamic": Entry(rotary(img_size=48, dynamic_img_size=True), (40, 24)),
    "rotary mixed dynamic": Entry(
        rotary(img_size=48, dynamic_img_size=True, rope_type="mixed", use_abs_pos_emb=False),
        (40, 24),
    ),
    "rotary attention": Entry(rotary(attn_type="rope", qk_norm=True, scale_attn_inner=True)),
    "rotary half": Entry(rotary(rope_rotate_half=True, rope_type="dinov3")),
    "rotary unfused": Entry(without_fusion(rotary())),
    "rotary separate bias": Entry(with_separate_bias),
    "no bias": Entry(rotary(qkv_bias=False, use_rot_pos_emb=False)),
    "attention scale only": Entry(rotary(init_values=0.5, attn_only_layer_scale=True)),
    "sam unfused": Entry(without_fusion(ZOO["sam"].make), (40, 56)),
    "sam global": Entry(
        lambda: spread(
            sam.VisionTransformerSAM(
                **TINY, img_size=FRAME, patch_size=8, window_size=0, use_rel_pos=True, qk_norm=True
            )
        )
    ),
    "sam plain": Entry(
        lambda: spread(
            sam.VisionTransformerSAM(
                **TINY, img_size=40, patch_size=8, window_size=4, use_abs_pos=False, init_values=0.5
            )
        ),
        (40, 40),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    model = make(VARIANTS[name])
    assert_dense(VARIANTS[name], model, Config.fast(EVERYTHING))
    assert_dense(VARIANTS[name], model, Config.exact(Threshold(1e-6)), noise=0.0)


def test_rows_of_rotary_position_differ_by_stream() -> None:
    """A table with a batch axis, which timm makes when it drops patches."""
    (spec, *_) = specs_of(eventful.convert(make(ZOO["eva02"])))
    tokens, index = torch.randn(2, 6, 32), torch.stack([torch.randperm(21)[:6] for _ in range(2)])
    tables = torch.randn(2, 1, 20, 32)
    got = spec.qkv(tokens, index, tables)
    for row in range(2):
        alone = spec.qkv(tokens[row : row + 1], index[row : row + 1], tables[row, 0])
        for part, expected in zip(got, alone, strict=True):
            torch.testing.assert_close(part[row : row + 1], expected)


def test_half_precision_stays_half() -> None:
    model = make(ZOO["dinov3"]).to(torch.bfloat16)
    stream = stream_of(model, Config.fast(EVERYTHING))
    for frame in moving_square(2, FRAME, noise=0.1):
        got = run(ZOO["dinov3"], stream, frame.bfloat16())
        expected = run(ZOO["dinov3"], model, frame.bfloat16())
        assert got.dtype == torch.bfloat16
        assert_near(got, expected)


@pytest.mark.parametrize(("name", "added"), [("eva02", 1), ("dinov3", 0), ("vit", 1), ("sam", 1)])
def test_positions_are_counted_where_they_are_added(name: str, added: int) -> None:
    stream = stream_of(make(ZOO[name]), Config.fast(EVERYTHING))
    run(ZOO[name], stream, moving_square(1, ZOO[name].size)[0])
    assert len(stream.last.positions) == added


NAMES = (
    "vit_tiny_patch16_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_base_patch16_clip_224",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_siglip_gap_224",
    "vit_tiny_r_s16_p8_224",
    "vit_base_patch16_rope_reg1_gap_256",
    "vit_small_patch16_rope_224",
    "vit_small_patch16_rope_mixed_ape_224",
    "eva02_tiny_patch14_224",
    "eva02_base_patch14_448",
    "eva_giant_patch14_224",
    "vit_small_patch16_dinov3_qkvb",
    "vit_pe_core_tiny_patch16_384",
    "samvit_base_patch16_224",
)


@pytest.mark.parametrize("name", NAMES)
def test_models_on_timms_list_match(name: str) -> None:
    model = timm.create_model(name, img_size=64, **TINY)
    assert eventful.inspect(model).matched == 3


class Foreign(vit.Block):
    """A block that goes its own way, as token merging does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def recording() -> nn.Module:
    model = plain()()
    for block in model.blocks:
        block.attn.forward = lambda x, **_: x
    return model


def gated() -> nn.Module:
    model = rotary()()
    for block in model.blocks:
        block.attn.gate = nn.Linear(32, 32)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another forward": (plain(block_fn=Foreign), "not that of timm.*Block"),
    "replaced forward": (recording, "Attention is not"),
    "gate": (gated, "gated by the block's input"),
    "rotation in windows": (
        lambda: sam.VisionTransformerSAM(
            **TINY, img_size=40, patch_size=8, window_size=4, use_rope=True
        ),
        "place in a window",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_why(case: str) -> None:
    build, reason = REFUSED[case]
    with pytest.raises(NoMatchError, match=reason):
        eventful.convert(build().eval())


def test_a_subclass_without_a_forward_matches() -> None:
    class Renamed(vit.Block):
        pass

    assert eventful.inspect(plain(block_fn=Renamed)()).matched == 3


@pytest.mark.parametrize("name", ["vit", "dinov3"])
def test_masks_are_refused(name: str) -> None:
    stream = stream_of(make(ZOO[name]), Config.fast(EVERYTHING))
    frame = moving_square(1, FRAME)[0]
    with pytest.raises(UnsupportedError, match="is_causal"):
        stream(frame, is_causal=True)


def test_torchvision_by_itself() -> None:
    torch.manual_seed(7)
    make_vit = load("torchvision.models.vision_transformer").VisionTransformer
    model = spread(make_vit(32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64))
    found = eventful.inspect(model)
    names = [block.name for block in found.blocks]
    assert names == ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"]
    assert (found.size, found.tokens) == ((32, 32), {"": 17})
    assert_dense(Entry(lambda: model, (32, 32)), model, Config.fast(EVERYTHING))


def test_named_models_are_made_small() -> None:
    assert sum(p.numel() for p in named("vit_small_patch16_dinov3")().parameters()) < 10**5
    assert isinstance(named("eva02_tiny_patch14_224")(), eva.Eva)
