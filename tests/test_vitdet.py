"""ViTDet: parity with other implementations, its boxes and regions, and its eventful path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import eventful
from clips import moving_square
from eventful.config import PRESETS
from eventful.errors import ConfigError, FrameError, UnsupportedError
from eventful.models.blocks import pooled
from eventful.models.loading import load_weights
from eventful.models.shapes import vitdet_shapes
from eventful.models.vitdet import (
    BackboneConfig,
    Detections,
    Placement,
    Target,
    ViTDet,
    ViTDetBackbone,
    ViTDetConfig,
    boxes,
    paste_masks,
    prepare,
    vitdet_b,
)
from eventful.models.vitdet.frames import Targets, fitted_size
from eventful.models.vitdet.heads import HeadConfig
from eventful.models.vitdet.losses import Sampling, box_losses, label_candidates
from eventful.models.vitdet.model import detector_config
from eventful.surgery.libraries import load
from published import config_from
from test_golden import CASES, read
from test_regions import random_boxes
from tolerances import BOXES, SCORES, VALUES, apart, assert_near, limit


def tiny(cascade: bool = False, size: int = 96, **heads: object) -> ViTDet:
    """A detector with two windowed blocks and a global one."""
    torch.manual_seed(0)
    config = detector_config(
        5,
        size,
        cascade,
        "linear",
        trained_size=128,
        dim=32,
        depth=3,
        heads=4,
        window=4,
        global_blocks=(1,),
        pretrained_grid=5,
    )
    settings = {"hidden": 16, "score_threshold": 0.01, "detections": 20, **heads}
    config = replace(config, channels=16, heads=replace(config.heads, **settings))
    model = ViTDet(config).eval()
    stir(model)
    return model


def stir(model: torch.nn.Module) -> None:
    """Weights that let the input through; a model as it is initialised hardly looks at it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "rel_pos" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith("weight"):
                parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(torch.randn_like(parameter))


@pytest.mark.parametrize("pixels", [(1024, 1024), (672, 672), (600, 344)], ids=str)
def test_backbone_equals_that_of_transformers(pixels: tuple[int, int]) -> None:
    transformers = load("transformers")
    config = transformers.VitDetConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=1024,
        pretrain_image_size=224,
        window_size=14,
        window_block_indices=[0],
        use_relative_position_embeddings=True,
        out_indices=[2],
    )
    torch.manual_seed(1)
    theirs = transformers.VitDetBackbone(config).eval()
    stir(theirs)
    ours = ViTDetBackbone(BackboneConfig(dim=16, depth=2, heads=2, global_blocks=(1,))).eval()
    assert load_weights(ours, theirs.state_dict(), "transformers").complete
    frame = torch.randn(1, 3, *pixels)
    with torch.no_grad():
        got, expected = ours(frame), theirs(frame).feature_maps[0]
    assert_near(got, expected, "library")
    assert float((got - expected).abs().max()) < limit("library")
    assert float(expected.abs().mean()) > 1


GOLDEN_NAMES = {
    "input_layer_norm": "norm1",
    "qkv": "attn.qkv",
    "projection": "attn.proj",
    "mlp_layer_norm": "norm2",
    "mlp_1": "mlp.fc1",
    "mlp_2": "mlp.fc2",
    "relative_position.y_embedding": "attn.rel_pos_h",
    "relative_position.x_embedding": "attn.rel_pos_w",
}


def golden_state(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The recorded blocks under our names."""
    state = {}
    for key, value in weights.items():
        if key.startswith("blocks."):
            _, number, rest = key.split(".", 2)
            old = next(name for name in GOLDEN_NAMES if rest.startswith(name))
            state[f"blocks.{number}.{rest.replace(old, GOLDEN_NAMES[old])}"] = value
    return state


@pytest.mark.parametrize("name", ["dense", "full", "stgt"])
def test_backbone_reproduces_the_published_arrays(name: str) -> None:
    path = next(path for path in CASES if path.stem == f"backbone_vitdet_{name}")
    meta, weights, frames = read(path)
    sizes = meta["block_config"]
    dim, grid = sizes["dim"], tuple(meta["input_size"])
    config = BackboneConfig(
        size=grid[0],
        trained_size=sizes["relative_embedding_size"][0],
        patch=1,
        channels=dim,
        dim=dim,
        depth=meta["depth"],
        heads=sizes["heads"],
        window=sizes["window_size"][0],
        global_blocks=tuple(set(range(meta["depth"])) - set(meta["window_indices"])),
        pretrained_grid=meta["position_encoding_size"][0],
        class_slot=False,
        rel_pos_resize="bicubic",
    )
    backbone = ViTDetBackbone(config).eval()
    state = golden_state(weights)
    state["pos_embed"] = weights["position_encoding.encoding"]
    # The recordings begin with tokens: patches of one pixel, embedded by the identity.
    state["patch_embed.weight"] = torch.eye(dim)[:, :, None, None]
    state["patch_embed.bias"] = torch.zeros(dim)
    backbone.load_state_dict(state)
    stream = eventful.Stream(eventful.convert(backbone, config_from(meta)))
    for t, (tokens, expected) in enumerate(frames):
        image = tokens.transpose(1, 2).unflatten(2, grid)
        if meta["policy"] is None:
            with torch.no_grad():
                out = backbone(image)
        else:
            out = stream(image)
        assert_near(out.flatten(2).transpose(1, 2), expected, "library", f"frame {t}")


@pytest.mark.parametrize("preset", PRESETS)
def test_updating_every_token_is_dense(preset: str) -> None:
    model = tiny(size=88)  # a grid of 5 x 5 in windows of 4: ragged
    converted = eventful.convert(model, eventful.Config.preset(preset, eventful.TopR(25)))
    stream = eventful.Stream(converted)
    for frame in moving_square(4, (88, 88)):
        with torch.no_grad():
            expected = model.features(frame)
        got = stream.call("features", frame)
        assert [part.shape[-1] for part in got] == [20, 10, 5, 2, 1]
        for a, b in zip(got, expected, strict=True):
            assert_near(a, b)


@pytest.mark.parametrize("preset", PRESETS)
def test_detector_runs_in_a_stream(preset: str) -> None:
    model = tiny()
    config = eventful.Config.preset(preset, eventful.TopR(9), max_age=None)
    converted = eventful.convert(model, config)
    stream = eventful.Stream(converted)
    place = Placement((48, 60), (77, 96))
    for frame in moving_square(3, (96, 96)):
        (found,) = stream(frame, [place])
    assert set(stream.last.updated.values()) == {9.0}
    assert stream.last.macs < stream.last.dense_macs
    assert isinstance(found, Detections)
    assert len(found)
    assert found.boxes[:, 2].max() <= 60
    assert found.boxes[:, 3].max() <= 48
    with torch.no_grad():
        outside, dense = converted(frame, [place])[0], model(frame, [place])[0]
    assert torch.equal(outside.boxes, dense.boxes)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_budget_of_a_detector_changes_between_frames(preset: str) -> None:
    """A small one first, then every token: from there on the boxes are those of the dense model."""
    model = tiny(cascade=True)
    config = eventful.Config.preset(preset, eventful.TopR(4), max_age=None)
    converted = eventful.convert(model, config)
    stream = eventful.Stream(converted)
    updated = []
    for number, frame in enumerate(moving_square(6, (96, 96))):
        pixels, place = model.prepare(64 * frame[0, :, :70] + 100)
        stream.policy = eventful.TopR(36 if number == 5 else 4 + number)
        (found,) = stream(pixels, [place])
        updated.append(set(stream.last.updated.values()))
    assert updated[1:] == [{5.0}, {6.0}, {7.0}, {8.0}, {36.0}]
    with torch.no_grad():
        (dense,) = model(pixels, [place])
    assert len(found) == len(dense) > 0
    assert torch.equal(found.labels, dense.labels)
    torch.testing.assert_close(found.boxes, dense.boxes, **BOXES)
    torch.testing.assert_close(found.scores, dense.scores, **SCORES)
    assert found.masks is not None
    torch.testing.assert_close(found.masks, dense.masks, **SCORES)


def test_frames_of_several_sizes_in_one_batch_are_the_frames_alone() -> None:
    model = tiny()
    torch.manual_seed(3)
    frames = [torch.randint(256, (3, *size)) for size in ((60, 96), (200, 90), (33, 33), (1, 57))]
    prepared = [model.prepare(frame) for frame in frames]
    places = [place for _, place in prepared]
    assert len({place.content for place in places}) == 4
    with torch.no_grad():
        together = model(torch.cat([pixels for pixels, _ in prepared]), places)
        apiece = [model(pixels, [place])[0] for pixels, place in prepared]
    for frame, one, other in zip(frames, together, apiece, strict=True):
        assert torch.equal(one.labels, other.labels)
        torch.testing.assert_close(one.boxes, other.boxes, **BOXES)
        torch.testing.assert_close(one.scores, other.scores, **SCORES)
        assert bool(boxes.nonempty(one.boxes).all())
        assert bool((one.boxes >= 0).all())
        assert bool((one.boxes <= torch.tensor(frame.shape[1:]).flip(0).repeat(2)).all())
    assert all(len(found) for found in together[:3])


@pytest.mark.parametrize("size", [(32, 32), (33, 200), (100, 37)])
def test_frames_of_odd_sizes(size: tuple[int, int]) -> None:
    with torch.no_grad():
        (found,) = tiny()(torch.randn(1, 3, *size))
    assert len(found)
    assert float(found.boxes[:, 2].max()) <= size[1]
    assert float(found.boxes[:, 3].max()) <= size[0]


@pytest.mark.parametrize("shape", [(1, 3, 16, 96), (0, 3, 96, 96), (3, 96, 96)], ids=str)
def test_frames_that_no_detector_takes(shape: tuple[int, ...]) -> None:
    with pytest.raises(FrameError, match="at least 32 px"):
        tiny()(torch.randn(shape))


def test_what_lies_in_the_padding_is_never_found() -> None:
    """The proposals and boxes of a frame stay in it, whatever fills the rest of the square."""
    model = tiny()
    pixels, place = model.prepare(torch.randint(256, (3, 48, 96)))
    noisy = pixels.clone()
    noisy[..., place.content[0] :, :] = 9 * torch.randn(96 - place.content[0], 96)
    with torch.no_grad():
        maps = model.features(noisy)
        found = model.rpn.propose(model.rpn(maps), torch.tensor([place.content]))
        proposals = found.boxes[found.valid]
        (found,) = model(noisy, [place])
    assert len(proposals)
    assert float(proposals[:, 3].max()) <= place.content[0]
    assert float(found.boxes[:, 3].max()) <= 48


def test_streams_of_a_batch_are_the_streams_alone() -> None:
    model = eventful.convert(tiny(), eventful.Config.fast(eventful.TopR(9)))
    batch, places = eventful.StreamBatch(model), [Placement((48, 60), (77, 96))] * 2
    alone = [eventful.Stream(model) for _ in range(2)]
    for name in "ab":
        batch.join(name)
    for frames in moving_square(3, (96, 96), batch=2):
        together = batch(frames, places)
        apiece = [stream(frames[i : i + 1], places[:1])[0] for i, stream in enumerate(alone)]
    for a, b in zip(together, apiece, strict=True):
        assert torch.equal(a.labels, b.labels)
        torch.testing.assert_close(a.boxes, b.boxes, **BOXES)


def test_half_precision_keeps_boxes_in_full() -> None:
    model = tiny(cascade=True)
    frame = moving_square(1, (96, 96))[0]
    with torch.no_grad():
        full = model(frame)[0]
        half = model.bfloat16()(frame.bfloat16())[0]
    assert half.boxes.dtype == half.scores.dtype == torch.float32
    assert boxes.iou(full.boxes[:1], half.boxes).max() > 0.8


def test_inspection_knows_the_backbone() -> None:
    report = eventful.inspect(tiny())
    assert (report.matched, report.tokens) == (3, {"backbone": 36})
    assert report.size == (96, 96)


def test_real_modules_have_the_tokens_of_the_paper() -> None:
    assert [shape.tokens for shape in vitdet_shapes(1024)] == [4096] * 12
    assert [shape.tokens for shape in vitdet_shapes(672)] == [1764] * 12


def test_frames_are_fitted_padded_and_boxes_come_back() -> None:
    assert fitted_size((720, 1280), 640, 1024) == (576, 1024)
    assert fitted_size((480, 500), 640, 1024) == (640, 667)
    frame = torch.zeros(3, 72, 128, dtype=torch.uint8)
    frame[:, 18:36, 32:64] = 255
    pixels, place = prepare(frame, 256, 160)
    assert place == Placement((72, 128), (144, 256))
    assert pixels.shape == (1, 3, 256, 256)
    assert not pixels[..., 144:, :].any()  # padded after normalisation: with the mean colour
    bright = (pixels[0, 0] > 1).nonzero()
    assert bright.min(0).values.tolist() == [36, 64]
    assert bright.max(0).values.tolist() == [71, 127]
    given = torch.tensor([[32.0, 18.0, 64.0, 36.0]])
    assert place.into(given).tolist() == [[64.0, 36.0, 128.0, 72.0]]
    found = Detections(
        torch.cat([place.into(given), torch.tensor([[5.0, 150.0, 20.0, 200.0]])]),
        torch.ones(2),
        torch.zeros(2),
    )
    assert torch.equal(found.back(place).boxes, given)  # the box in the padding is gone
    with pytest.raises(FrameError, match="3, height, width"):
        prepare(torch.zeros(72, 128, 3), 256)
    vid = vitdet_small_edges()
    assert vid == {1024: (576, 1024), 672: (378, 672)}


def vitdet_small_edges() -> dict[int, tuple[int, int]]:
    frame = torch.zeros(3, 720, 1280, dtype=torch.uint8)
    edges = {}
    for size in (1024, 672):
        config = ViTDetConfig(BackboneConfig(size=size, dim=16, depth=0, heads=1), HeadConfig())
        edges[size] = ViTDet(replace(config, channels=4)).prepare(frame)[1].content
    return edges


def test_cascade_averages_its_stages() -> None:
    model = tiny(cascade=True, masks=False)
    logits = torch.randn(3, 1, 6)
    for stage, row in zip(model.heads.stages, logits, strict=True):
        torch.nn.init.zeros_(stage.scores.weight)
        torch.nn.init.zeros_(stage.deltas.weight)
        torch.nn.init.zeros_(stage.deltas.bias)
        stage.scores.bias.data.copy_(row[0])
    proposal = torch.tensor([[8.0, 8.0, 40.0, 60.0]])
    maps = model.features(torch.randn(1, 3, 96, 96))
    given = boxes.Padded(proposal[None], torch.ones(1, 1, dtype=torch.bool))
    (found,) = model.heads(maps, given, torch.tensor([[96, 96]]))
    mean = logits.softmax(dim=2).mean(dim=0)[0, :-1]
    assert torch.equal(found.labels, mean.argsort(descending=True))
    torch.testing.assert_close(found.scores, mean.sort(descending=True).values)
    torch.testing.assert_close(found.boxes, proposal.expand(5, 4))


def test_masks_lie_in_their_boxes() -> None:
    model = tiny(cascade=True)
    with torch.no_grad():
        (found,) = model(torch.randn(1, 3, 96, 96))
    assert found.masks is not None
    assert found.masks.shape == (len(found), 28, 28)
    full = Detections(torch.tensor([[2.0, 3.0, 6.0, 9.0]]), torch.ones(1), torch.zeros(1).long(),
                      torch.ones(1, 28, 28))  # fmt: skip
    mask = paste_masks(full, (12, 10))[0]
    assert mask.nonzero().min(0).values.tolist() == [3, 2]
    assert int(mask.sum()) == 24
    with pytest.raises(UnsupportedError, match="mask head"):
        paste_masks(replace(full, masks=None), (12, 10))


def test_sampled_candidates() -> None:
    target = Target(torch.tensor([[10.0, 10.0, 50.0, 50.0]]), torch.tensor([3]))
    candidates = torch.cat([target.boxes + 2, random_boxes(80, 20) + 60])
    none = Target(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    images = Targets.of([target, none], torch.device("cpu"))
    given = boxes.Padded(candidates.expand(2, -1, -1), torch.ones(2, 81, dtype=torch.bool))
    found = label_candidates(given, images, Sampling(16, 0.25, 0.5, 0.5), 5)
    assert found.valid.shape == (2, 16)
    assert found.valid.all()
    assert sorted(found.labels[0].tolist()) == [3, 3, *[5] * 14]  # the object itself joins in
    assert found.labels[1].tolist() == [5] * 16
    exact = boxes.BoxCoder((10.0, 10.0, 5.0, 5.0))
    objects = (found.labels < 5)[..., None]
    codes = exact.encode(found.boxes, torch.where(objects, found.goals, found.boxes))
    codes = codes.flatten(0, 1)[:, None]
    right = 50 * torch.nn.functional.one_hot(found.labels.flatten(), 6).float()
    for loss in ("l1", "giou"):
        perfect = box_losses(right, codes, found, exact, loss=loss)
        assert all(abs(float(value)) < 1e-5 for value in perfect.values())
        shifted = box_losses(right, codes + 1, found, exact, loss=loss)
        assert float(shifted["box"]) > 0.01


@pytest.mark.parametrize("cascade", [False, True])
def test_training_finds_the_object(cascade: bool) -> None:
    """The losses, the coding and the inference belong together: what is trained is found."""
    small = {"score_threshold": 0.3, "samples": 32, "masks": False, "hidden": 128, "convs": 1}
    config = tiny(cascade, size=64, **small).config
    torch.manual_seed(0)
    model = ViTDet(config).train()
    frame = torch.zeros(1, 3, 64, 64)
    frame[..., 12:44, 20:60] = 2.0
    target = Target(torch.tensor([[20.0, 12.0, 60.0, 44.0]]), torch.tensor([2]))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        losses = model.losses(frame, [target])
        torch.stack(list(losses.values())).sum().backward()
        optimiser.step()
    expected = {"rpn_objectness", "rpn_box"}
    stages = [f"_{i}" for i in range(3)] if cascade else [""]
    assert set(losses) == expected | {f"{kind}{s}" for kind in ("class", "box") for s in stages}
    with torch.no_grad():
        (found,) = model.eval()(frame)
    assert found.labels[0] == 2
    assert boxes.iou(found.boxes[:1], target.boxes).item() > 0.6
    with pytest.raises(ConfigError, match="one for each"):
        model.losses(frame, [])


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="bicubic"):
        BackboneConfig(rel_pos_resize="nearest")
    with pytest.raises(ConfigError, match="cascade"):
        ViTDetConfig(heads=HeadConfig(stages=4))
    with pytest.raises(ConfigError, match="divide"), torch.device("meta"):
        ViTDetBackbone(BackboneConfig(heads=7))
    with torch.device("meta"):
        model = vitdet_b(30, 672)
    assert ViTDetConfig.from_dict(model.config.to_dict()) == model.config
    assert model.config.backbone.rel_pos_resize == "bicubic"


@pytest.mark.parametrize("size", [64, 80], ids=["whole cells", "cells cut by the border"])
def test_pooled_keys_are_those_of_the_rule(size: int) -> None:
    """Dense with pooled keys equals a flush of the eventful rule with the same pooling."""
    backbone = tiny(size=size).backbone
    stir(backbone)
    pixels = torch.randn(1, 3, size, size)
    pooled_model = pooled(backbone, 2)
    with torch.no_grad():
        got, plain = pooled_model(pixels), backbone(pixels)
    rule = eventful.Config.tokenwise(eventful.Always(), pool=2)
    wanted = eventful.Stream(eventful.convert(backbone, rule))(pixels)
    torch.testing.assert_close(got, wanted, **VALUES)
    assert apart(got, plain) > 100 * limit("model")
    assert pooled_model.pos_embed is backbone.pos_embed
    reasons = [block.reason or "" for block in eventful.inspect(pooled_model, size).blocks]
    assert any("Config(pool=...)" in reason for reason in reasons)
