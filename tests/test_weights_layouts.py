"""Published checkpoints: every key accounted for, and nothing in a file is run."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eventful.errors import CheckpointError
from eventful.models.blocks import Block
from eventful.models.key_formats import KEY_FORMATS
from eventful.models.loading import build, convert_checkpoint, load_model, load_weights, save
from eventful.models.vitdet import BackboneConfig, ViTDet, ViTDetBackbone, vitdet_b
from eventful.models.vivit import ViViT, vivit_b_epic, vivit_b_kinetics
from eventful.surgery.libraries import load
from tolerances import VALUES

Shapes = dict[str, tuple[int, ...]]

SMALL = {"dim": 64, "depth": 3, "channels": 8, "hidden": 12, "side": 6, "window": 4, "patch": 4}
BASE = {"dim": 768, "depth": 12, "channels": 256, "hidden": 1024, "side": 64, "window": 14,
        "patch": 16}  # fmt: skip


def with_bias(name: str, *shape: int, out: int | None = None) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": (out or shape[0],)}


def norm(name: str, width: int) -> Shapes:
    return with_bias(name, width)


def conv_norm(name: str, before: int, after: int, kernel: int) -> Shapes:
    return {f"{name}.weight": (after, before, kernel, kernel), **norm(f"{name}.norm", after)}


def block(name: str, dim: int, qkv: str, proj: str, parts: tuple[str, str, str, str]) -> Shapes:
    first, second, wide, narrow = parts
    return {
        **norm(f"{name}.{first}", dim),
        **with_bias(f"{name}.{qkv}", 3 * dim, dim),
        **with_bias(f"{name}.{proj}", dim, dim),
        **norm(f"{name}.{second}", dim),
        **with_bias(f"{name}.{wide}", 4 * dim, dim),
        **with_bias(f"{name}.{narrow}", dim, 4 * dim),
    }


def detectron_keys(classes: int, cascade: bool, sizes: dict[str, int]) -> Shapes:
    """The published names and shapes, written out from the description of the files."""
    dim, channels, hidden = sizes["dim"], sizes["channels"], sizes["hidden"]
    net, pyramid, rpn = "backbone.net", "backbone.simfp", "proposal_generator.rpn_head"
    shapes: Shapes = {f"{net}.pos_embed": (1, 197, dim)}
    shapes |= with_bias(f"{net}.patch_embed.proj", dim, 3, sizes["patch"], sizes["patch"])
    for i in range(sizes["depth"]):
        names = ("norm1", "norm2", "mlp.fc1", "mlp.fc2")
        shapes |= block(f"{net}.blocks.{i}", dim, "attn.qkv", "attn.proj", names)
        rows = 2 * (sizes["side"] if i % 3 == 2 else sizes["window"]) - 1
        for axis in "hw":
            shapes[f"{net}.blocks.{i}.attn.rel_pos_{axis}"] = (rows, 64)
    shapes |= with_bias(f"{pyramid}_2.0", dim, dim // 2, 2, 2, out=dim // 2)
    shapes |= norm(f"{pyramid}_2.1", dim // 2)
    shapes |= with_bias(f"{pyramid}_2.3", dim // 2, dim // 4, 2, 2, out=dim // 4)
    shapes |= with_bias(f"{pyramid}_3.0", dim, dim // 2, 2, 2, out=dim // 2)
    for level, first, before in ((2, 4, dim // 4), (3, 1, dim // 2), (4, 0, dim), (5, 1, dim)):
        shapes |= conv_norm(f"{pyramid}_{level}.{first}", before, channels, 1)
        shapes |= conv_norm(f"{pyramid}_{level}.{first + 1}", channels, channels, 3)
    for i in range(2):
        shapes |= with_bias(f"{rpn}.conv.conv{i}", channels, channels, 3, 3)
    shapes |= with_bias(f"{rpn}.objectness_logits", 3, channels, 1, 1)
    shapes |= with_bias(f"{rpn}.anchor_deltas", 12, channels, 1, 1)
    for stage in (".0", ".1", ".2") if cascade else ("",):
        head, predictor = f"roi_heads.box_head{stage}", f"roi_heads.box_predictor{stage}"
        for i in range(1, 5):
            shapes |= conv_norm(f"{head}.conv{i}", channels, channels, 3)
        shapes |= with_bias(f"{head}.fc1", hidden, channels * 49)
        shapes |= with_bias(f"{predictor}.cls_score", classes + 1, hidden)
        shapes |= with_bias(f"{predictor}.bbox_pred", 4 if cascade else 4 * classes, hidden)
    if cascade:
        mask = "roi_heads.mask_head"
        for i in range(1, 5):
            shapes |= conv_norm(f"{mask}.mask_fcn{i}", channels, channels, 3)
        shapes |= with_bias(f"{mask}.deconv", channels, channels, 2, 2)
        shapes |= with_bias(f"{mask}.predictor", classes, channels, 1, 1)
    return shapes


def vivit_keys(classes: int, side: int, epic: bool, dim: int, depth: int) -> Shapes:
    shapes: Shapes = {
        "backbone.cls_token": (1, 1, dim),
        "backbone.pos_embd": (1, side * side + 1, dim),
        "backbone.cls_token_out": (1, 1, dim),
        "backbone.temp_embd": (1, 17, dim),
        **with_bias("backbone.stem.conv1", dim, 3, 2, 16, 16),
        **norm("backbone.norm", dim),
        **norm("backbone.norm_out", dim),
    }
    names = ("norm", "norm_ffn", "ffn.net.0", "ffn.net.3")
    for layers, count in (("layers", depth), ("layers_temporal", 4)):
        for i in range(count):
            shapes |= block(f"backbone.{layers}.{i}", dim, "attn.to_qkv", "attn.proj", names)
    if epic:
        shapes |= with_bias("head.linear1", classes, dim) | with_bias("head.linear2", 300, dim)
    else:
        shapes |= with_bias("head.linear", classes, dim)
    return shapes


def authors_vivit_keys(classes: int, side: int, dim: int, depth: int) -> Shapes:
    """The names in the module of the paper's authors, written out from its description."""
    shapes: Shapes = {
        **with_bias("embedding.conv", dim, 3, 2, 16, 16),
        **with_bias("classifier", classes, dim),
    }
    names = ("input_layer_norm", "mlp_layer_norm", "mlp_1", "mlp_2")
    for part, places, count in (("spatial", side * side, depth), ("temporal", 16, 4)):
        model = f"{part}_model"
        shapes |= {
            f"{model}.class_token": (1, 1, dim),
            f"{model}.backbone.position_encoding.encoding": (1, places + 1, dim),
            **norm(f"{model}.layer_norm", dim),
        }
        for i in range(count):
            shapes |= block(f"{model}.backbone.blocks.{i}", dim, "qkv", "projection", names)
    return shapes


def filled(shapes: Shapes) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=make) for key, shape in shapes.items()}


def weightless(shapes: Shapes) -> dict[str, Tensor]:
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


@pytest.mark.parametrize("cascade", [True, False], ids=["coco", "vid"])
def test_a_detectron2_checkpoint_loads_with_nothing_left_over(
    cascade: bool, tmp_path: Path
) -> None:
    given = filled(detectron_keys(7, cascade, SMALL))
    path = tmp_path / "model.pkl"
    arrays = {key: value.numpy() for key, value in given.items()}
    path.write_bytes(pickle.dumps({"model": arrays, "__author__": "someone"}, protocol=2))
    converted = convert_checkpoint(path, "auto")
    assert converted.report.complete
    assert (converted.report.format, len(converted.report.used)) == ("detectron2", len(given))
    save(converted, tmp_path / "ours.safetensors")
    model = load_model(tmp_path / "ours.safetensors", size=40)
    assert isinstance(model, ViTDet)
    assert len(model.state_dict()) == len(given)
    assert model.config.backbone.size == 40
    assert model.config.backbone.rel_pos_resize == ("linear" if cascade else "bicubic")
    expected = {
        "backbone.net.blocks.2.attn.rel_pos_w": model.backbone.blocks[2].attn.rel_pos_w,
        "backbone.simfp_2.5.norm.bias": model.pyramid.p2[5].norm.bias,
        "proposal_generator.rpn_head.conv.conv1.weight": model.rpn.convs[1].weight,
    }
    if cascade:
        expected |= {
            "roi_heads.box_head.2.conv4.weight": model.heads.stages[2].convs[3].weight,
            "roi_heads.mask_head.mask_fcn1.norm.weight": model.heads.mask.convs[0].norm.weight,
        }
    else:
        expected["roi_heads.box_predictor.bbox_pred.bias"] = model.heads.stages[0].deltas.bias
    for key, parameter in expected.items():
        assert torch.equal(parameter, given[key]), key
    with torch.no_grad():
        assert len(model(torch.randn(1, 3, 40, 40))) == 1


def test_full_size_layouts_are_those_of_the_presets() -> None:
    with torch.device("meta"):
        presets = {
            "coco": vitdet_b(80, cascade=True),
            "vid": vitdet_b(30),
            "epic": vivit_b_epic(),
            "kinetics": vivit_b_kinetics(),
        }
    files = {
        "coco": detectron_keys(80, True, BASE),
        "vid": detectron_keys(30, False, BASE),
        "epic": vivit_keys(97, 20, True, 768, 12),
        "kinetics": vivit_keys(400, 14, False, 768, 12),
        "authors": authors_vivit_keys(400, 14, 768, 12),
    }
    presets["authors"] = presets["kinetics"]
    for name, shapes in files.items():
        converted = convert_checkpoint(weightless(shapes))
        assert converted.report.complete, name
        assert converted.config == presets[name].config.to_dict(), name
        assert set(converted.state) == set(presets[name].state_dict()), name


def test_missing_and_extra_keys_are_reported() -> None:
    given = filled(detectron_keys(7, True, SMALL))
    lost = given.pop("backbone.net.blocks.1.attn.qkv.bias")
    given["backbone.net.blocks.1.attn.extra"] = lost
    given["roi_heads.box_head.0.fc1.bias"] = torch.zeros(13)
    with pytest.raises(CheckpointError) as refused:
        convert_checkpoint(given, "detectron2")
    message = str(refused.value)
    assert "missing from the file: backbone.blocks.1.attn.qkv.bias" in message
    assert "unexpected in the file: backbone.net.blocks.1.attn.extra" in message
    assert "heads.stages.0.fc.bias ((13,) in the file, (12,) in the model)" in message
    report = convert_checkpoint(given, "detectron2", strict=False).report
    assert report.missing == ("backbone.blocks.1.attn.qkv.bias",)
    assert report.unexpected == ("backbone.net.blocks.1.attn.extra",)
    assert list(report.mismatched) == ["heads.stages.0.fc.bias"]
    assert not report.complete


def test_keys_that_are_known_and_not_needed() -> None:
    given = filled(detectron_keys(7, False, SMALL))
    given["pixel_mean"] = torch.zeros(3, 1, 1)
    given["proposal_generator.anchor_generator.cell_anchors.0"] = torch.zeros(3, 4)
    report = convert_checkpoint(given, "vid").report
    assert report.complete
    assert set(report.unneeded) == {
        "pixel_mean",
        "proposal_generator.anchor_generator.cell_anchors.0",
    }


@pytest.mark.parametrize("epic", [True, False])
def test_a_vivit_checkpoint_loads_with_nothing_left_over(epic: bool, tmp_path: Path) -> None:
    given = filled(vivit_keys(5, 2, epic, 64, 2))
    torch.save({"model_state": given, "epoch": 3, "cfg": "text"}, tmp_path / "vivit.pyth")
    converted = convert_checkpoint(tmp_path / "vivit.pyth")
    assert converted.report.complete
    nouns = {"head.linear2.weight", "head.linear2.bias"} if epic else set()
    assert set(converted.report.unneeded) == nouns
    assert len(converted.report.used) == len(given) - len(nouns)
    model = build(converted.model, converted.config)
    assert isinstance(model, ViViT)
    assert load_weights(model, converted.state).complete
    assert torch.equal(
        model.temporal.blocks[3].mlp.fc2.weight,
        given["backbone.layers_temporal.3.ffn.net.3.weight"],
    )
    name = "head.linear1.bias" if epic else "head.linear.bias"
    assert torch.equal(model.classifier.bias, given[name])


# A name in the authors' module, and the published one that they renamed to it.
RENAMED = {
    r"embedding\.conv": "backbone.stem.conv1",
    r"spatial_model\.class_token": "backbone.cls_token",
    r"temporal_model\.class_token": "backbone.cls_token_out",
    r"spatial_model\.backbone\.position_encoding\.encoding": "backbone.pos_embd",
    r"temporal_model\.backbone\.position_encoding\.encoding": "backbone.temp_embd",
    r"spatial_model\.layer_norm": "backbone.norm",
    r"temporal_model\.layer_norm": "backbone.norm_out",
    r"spatial_model\.backbone\.blocks": "backbone.layers",
    r"temporal_model\.backbone\.blocks": "backbone.layers_temporal",
    r"\.input_layer_norm": ".norm",
    r"\.qkv": ".attn.to_qkv",
    r"\.projection": ".attn.proj",
    r"\.mlp_layer_norm": ".norm_ffn",
    r"\.mlp_1": ".ffn.net.0",
    r"\.mlp_2": ".ffn.net.3",
    r"^classifier": "head.linear",
}


def test_the_authors_tuned_vivit_is_the_published_one_renamed(tmp_path: Path) -> None:
    given = filled(authors_vivit_keys(5, 2, 64, 2))
    torch.save(given, tmp_path / "tuned.pth")  # a bare state dict, with nothing around it
    converted = convert_checkpoint(tmp_path / "tuned.pth")
    assert converted.report.complete
    assert (converted.report.format, len(converted.report.used)) == ("vivit-authors", len(given))
    published = {}
    for key, value in given.items():
        for pattern, name in RENAMED.items():
            key = re.sub(pattern, name, key)
        published[key] = value
    assert published.keys() == vivit_keys(5, 2, False, 64, 2).keys()
    expected = convert_checkpoint(published, "vivit")
    assert converted.config == expected.config
    assert converted.state.keys() == expected.state.keys()
    assert all(torch.equal(converted.state[key], expected.state[key]) for key in expected.state)
    save(converted, tmp_path / "ours.safetensors")
    model = load_model(tmp_path / "ours.safetensors")
    assert isinstance(model, ViViT)
    assert load_weights(model, given, "vivit-authors").complete


def test_a_backbone_of_transformers(tmp_path: Path) -> None:
    transformers = load("transformers")
    config = transformers.VitDetConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=128,
        pretrain_image_size=64, window_size=4, window_block_indices=[1],
        use_relative_position_embeddings=True,
    )  # fmt: skip
    theirs = transformers.VitDetBackbone(config)
    theirs.save_pretrained(tmp_path)
    converted = convert_checkpoint(tmp_path / "model.safetensors", "transformers")
    assert converted.report.complete
    assert (converted.config["heads"], converted.config["global_blocks"]) == (2, (0,))
    save(converted, tmp_path / "ours.safetensors")
    backbone = load_model(tmp_path / "ours.safetensors")
    assert torch.equal(backbone.blocks[1].mlp.fc1.weight, theirs.encoder.layer[1].mlp.fc1.weight)


def vitdet_of_transformers(**settings: object):
    transformers = load("transformers")
    config = transformers.VitDetConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=128,
        pretrain_image_size=64, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.VitDetBackbone(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs


@pytest.mark.parametrize("size", [128, 80])
def test_tables_of_one_size_are_those_of_global_blocks(size: int) -> None:
    theirs = vitdet_of_transformers(use_relative_position_embeddings=True, window_size=0)
    converted = convert_checkpoint(theirs.state_dict())
    assert converted.config["global_blocks"] == (0, 1)
    ours = build(converted.model, converted.config).eval()
    load_weights(ours, converted.state)
    frame = torch.randn(1, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours(frame), theirs(frame).feature_maps[0], **VALUES)


def test_windows_that_a_file_does_not_tell_are_not_guessed() -> None:
    theirs = vitdet_of_transformers(window_size=4, window_block_indices=[0])
    with pytest.raises(CheckpointError, match="which blocks attend in windows"):
        convert_checkpoint(theirs.state_dict())
    config = BackboneConfig(
        128, 128, dim=64, depth=2, heads=2, window=4, global_blocks=(1,), pretrained_grid=4,
        relative=False,
    )  # fmt: skip
    ours = ViTDetBackbone(config).eval()
    assert load_weights(ours, theirs.state_dict(), "transformers").complete
    frame = torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        torch.testing.assert_close(ours(frame), theirs(frame).feature_maps[0], **VALUES)


SHAPES_GONE_WRONG = {
    "flat": lambda t: t.flatten(),
    "thin": lambda t: t[..., :1],
    "short": lambda t: t[:1],
    "nothing": lambda t: t[:0],
    "deeper": lambda t: t[None],
    "doubled": lambda t: torch.cat([t, t]),
    "a number": lambda t: t.sum(),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", ["coco", "vid", "vivit"])
def test_a_key_that_is_missing_or_of_another_shape_is_always_refused(kind: str) -> None:
    if kind == "vivit":
        shapes = vivit_keys(5, 2, False, 64, 1)
    else:
        shapes = detectron_keys(3, kind == "coco", SMALL)
    given = weightless(shapes)
    assert convert_checkpoint(given).report.complete
    for key in list(given)[:: 4 if kind == "vivit" else 11]:
        without = {name: tensor for name, tensor in given.items() if name != key}
        with pytest.raises(CheckpointError):
            convert_checkpoint(without, "vivit" if kind == "vivit" else "detectron2")
        for change in SHAPES_GONE_WRONG.values():
            wrong = change(given[key])
            if wrong.shape != given[key].shape:
                with pytest.raises(CheckpointError):
                    convert_checkpoint({**given, key: wrong})


def test_hidden_sizes_that_are_no_multiple_of_the_width() -> None:
    """A file tells the ratio as a fraction, and 49 * (27 / 49) falls short of 27."""
    for hidden in (27, 54, 55):
        assert int(49 * (hidden / 49)) < hidden
        assert Block(49, 7, hidden / 49).mlp.fc1.out_features == hidden


def test_a_detector_takes_what_fits_for_fine_tuning() -> None:
    coco = convert_checkpoint(filled(detectron_keys(7, True, SMALL)))
    vid = build("vitdet", convert_checkpoint(weightless(detectron_keys(3, False, SMALL))).config)
    with pytest.raises(CheckpointError, match="another shape"):
        load_weights(vid, coco.state)
    report = load_weights(vid, coco.state, strict=False)
    kinds = [f"{part}.{kind}" for part in ("scores", "deltas") for kind in ("weight", "bias")]
    assert sorted(report.mismatched) == sorted(f"heads.stages.0.{kind}" for kind in kinds)
    assert torch.equal(vid.pyramid.p4[0].weight, coco.state["pyramid.p4.0.weight"])


def test_formats_by_name_and_by_key() -> None:
    with pytest.raises(CheckpointError, match=r"vivit, vivit-authors, vid, and auto"):
        convert_checkpoint(filled({"a": (2,)}), "caffe")
    with pytest.raises(CheckpointError, match="no known format"):
        convert_checkpoint(filled({"a": (2,)}))
    with pytest.raises(CheckpointError, match="sizes cannot be read"):
        convert_checkpoint(filled({"a": (2,)}), "vivit")
    assert all(known.about for known in KEY_FORMATS.values())


def test_files_say_which_model_they_are_for(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(filled({"a": (2,)}), str(tmp_path / "x.safetensors"))
    with pytest.raises(CheckpointError, match="weights convert"):
        load_model(tmp_path / "x.safetensors")
    save(convert_checkpoint(filled(vivit_keys(5, 2, False, 64, 2))), tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match="no 'sizes'"):
        load_model(tmp_path / "y.safetensors", sizes=3)


def test_files_of_another_version_are_named_as_such(tmp_path: Path) -> None:
    converted = convert_checkpoint(filled(vivit_keys(5, 2, False, 64, 2)))
    for model, config in (
        ("vivit", {**converted.config, "wings": 2}),
        ("vitdet", {"backbone": {}}),
        ("slowfast", {}),
    ):
        save(replace(converted, model=model, config=config), tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match="another version"):
            load_model(tmp_path / "x.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]  # written whole


def test_the_old_word_for_a_format_still_works() -> None:
    given = filled(vivit_keys(5, 2, False, 64, 2))
    converted = convert_checkpoint(given, layout="vivit")
    assert converted.report.layout == converted.report.format == "vivit"
    assert converted.kind == converted.model == "vivit"
    model = build(converted.model, converted.config)
    assert load_weights(model, given, layout="vivit").complete
