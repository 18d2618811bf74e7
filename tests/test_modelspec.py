"""Models by name: every form, in every command, and what is said about names that mean nothing."""

from __future__ import annotations

import json
import subprocess
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eventful
import videos
from commands import here  # noqa: F401
from eventful import Stream, convert, inspect
from eventful.bench.video.footage import fitted_size
from eventful.errors import CheckpointError, ConfigError, EventfulError, UnsupportedError
from eventful.modelspec import hollow, weights
from eventful.modelspec.opening import RandomWeightsWarning, open_named
from eventful.modelspec.size import Longest, both_sides, in_words, parse_size
from eventful.pipeline.first_step import refusal
from eventful.pipeline.subject import SquareWarning, open_subject
from eventful.surgery.libraries import load

pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DINO = {**VIT, "model_type": "dinov2", "image_size": 56, "patch_size": 14}
DEPTH = {
    "model_type": "depth_anything",
    "architectures": ["DepthAnythingForDepthEstimation"],
    "patch_size": 14,
    "reassemble_hidden_size": 32,
    "neck_hidden_sizes": [8, 8],
    "reassemble_factors": [1, 0.5],
    "fusion_hidden_size": 8,
    "head_in_index": -1,
    "head_hidden_size": 8,
    "backbone_config": {
        **DINO, "out_indices": [1, 2], "reshape_hidden_states": False, "apply_layernorm": True,
    },
}  # fmt: skip
DEPTH_PRO = {
    "model_type": "depth_pro",
    "architectures": ["DepthProForDepthEstimation"],
    "fusion_hidden_size": 16,
    "patch_size": 16,
    "intermediate_hook_ids": [1, 0],
    "intermediate_feature_dims": [8, 8],
    "scaled_images_ratios": [0.5, 1.0],
    "scaled_images_overlap_ratios": [0.0, 0.2],
    "scaled_images_feature_dims": [16, 16],
    "use_fov_model": False,
    **{
        f"{part}_model_config": {**DINO, "patch_size": 4, "image_size": 32}
        for part in ("image", "patch", "fov")
    },
}
OWN = """
import timm
import torch
def tiny():
    return timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), depth=2, embed_dim=48)
def sized(size):
    return timm.create_model("vit_tiny_patch16_224", img_size=size, depth=2, embed_dim=48)
class Cut(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = timm.create_model("vit_tiny_patch16_224", img_size=(64, 48), depth=2)
    def forward(self, x):
        return self.vit(torch.cat(x.chunk(2, dim=3)))
def cut():
    return Cut()
def layers():
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = torch.nn.Conv2d(3, 32, 16, 16)
            self.blocks = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            return x
    return Own()
def broken():
    raise RuntimeError("no weights here\\nsecond line")
number = 3
"""


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def quietly(name: str, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RandomWeightsWarning)
        return open_named(name, **options).model


# The forms.


def test_architectures_of_a_config_decide_the_class(tmp_path: Path) -> None:
    path = folder(tmp_path / "depth", DEPTH)
    for name in (path, path / "config.json"):
        made = quietly(f"hf:{name}")
        assert type(made).__name__ == "DepthAnythingForDepthEstimation"
    vit = {**VIT, "model_type": "vit", "architectures": ["ViTForImageClassification"]}
    kind = type(quietly(f"hf:{folder(tmp_path / 'vit', vit)}"))
    assert kind.__name__ == "ViTForImageClassification"
    unknown = folder(tmp_path / "new", {**vit, "architectures": ["ViTForTomorrow"]})
    with pytest.raises(UnsupportedError, match="ViTForTomorrow, which transformers"):
        open_named(f"hf:{unknown}")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("depth_anything", "DepthAnythingForDepthEstimation"),  # has no AutoModel
        ("dinov2", "Dinov2Model"),
        ("DPTForDepthEstimation", "DPTForDepthEstimation"),
        ("ViTConfig", "ViTModel"),
    ],
)
def test_a_class_or_a_model_type_is_enough(name: str, kind: str) -> None:
    opened = open_named(f"hf:{name}", weightless=True)
    assert type(opened.model).__name__ == kind
    assert opened.random
    by_name = kind != "DPTForDepthEstimation"  # this one is known by its structure, with weights
    assert all(weight.is_meta == by_name for weight in opened.model.parameters())


def test_a_folder_comes_with_its_weights_and_a_config_says_that_it_has_none(tmp_path: Path) -> None:
    torch.manual_seed(1)
    path = tmp_path / "dino"
    saved = transformers.Dinov2Model(transformers.Dinov2Config(**DINO)).eval()
    saved.save_pretrained(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RandomWeightsWarning)
        made = open_named(f"hf:{path}")
    assert not made.random
    frame = torch.rand(1, 3, 56, 56)
    with torch.no_grad():
        assert saved(frame)[0].equal(made.model(frame)[0])
    (path / "model.safetensors").unlink()
    with pytest.warns(RandomWeightsWarning, match="random weights"):
        assert open_named(f"hf:{path}").random
    torch.save(saved.state_dict(), path / "pytorch_model.bin")
    again = open_named(f"hf:{path}").model
    with torch.no_grad():
        assert saved(frame)[0].equal(again(frame)[0])


class Trap:
    def __reduce__(self) -> Any:
        return (open, ("ran", "w"))


def test_pickled_weights_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = folder(tmp_path / "dino", DINO)
    torch.save({"weight": Trap()}, path / "pytorch_model.bin")
    torch.save({"weight": Trap()}, tmp_path / "w.pth")
    for name, given in ((path, None), (folder(tmp_path / "other", DINO), "w.pth")):
        with pytest.raises(CheckpointError):
            quietly(f"hf:{name}", weights=given)
    assert not (tmp_path / "ran").exists()


def test_transformers_is_never_told_to_trust_code(tmp_path, monkeypatch) -> None:
    given: list[dict[str, Any]] = []
    real = transformers.AutoConfig.from_pretrained

    def spy(*args: Any, **options: Any) -> Any:
        given.append(options)
        return real(*args, **options)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", spy)
    quietly(f"hf:{folder(tmp_path, DINO)}")
    assert [options["trust_remote_code"] for options in given] == [False]


def test_a_name_on_the_hub_is_not_fetched_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def refuse(*where: Any, **_: Any) -> Any:
        made.append(where)
        raise OSError("no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    with pytest.raises(UnsupportedError, match=r"not on this machine.*--weights pretrained"):
        open_named("hf:someone/a-model-that-is-not-here")
    assert made == []


def test_offline_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("We couldn't connect to the hub\nand so on")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    with pytest.raises(UnsupportedError, match=r"could not be fetched.*hf:FOLDER"):
        open_named("hf:someone/some-model", weights="pretrained")


def test_a_function_of_ones_own_may_take_the_size(own: None) -> None:
    made: Any = open_named("own_models_of_a_user:sized", size=(32, 64)).model
    assert tuple(made.patch_embed.img_size) == (32, 64)
    made = open_named("own_models_of_a_user:tiny", size=(32, 64)).model
    assert tuple(made.patch_embed.img_size) == (64, 96)
    for name, words in {
        "sized": "give --size",
        "broken": "RuntimeError: no weights here",
        "number": "no function 'number'",
        "tinny": "Names near it: tiny",
    }.items():
        with pytest.raises(UnsupportedError, match=words):
            open_named(f"own_models_of_a_user:{name}")


def test_weights_from_a_file_reach_every_kind_of_model(own: None, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    name = "own_models_of_a_user:tiny"
    state = {key: torch.full_like(value, 0.5) for key, value in quietly(name).state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    for file in ("w.safetensors", "w.pth"):
        made = open_named(name, weights=str(tmp_path / file))
        assert all(bool((weight == 0.5).all()) for weight in made.model.parameters())
    with pytest.raises(CheckpointError, match=r"does not fit|lacks"):
        open_named("timm:vit_tiny_patch16_224", weights=str(tmp_path / "w.safetensors"))
    with pytest.raises(UnsupportedError, match="has its own weights"):
        open_named("detector", weights="w.pth")


def test_weights_without_a_classifier_take_it_off_a_timm_model(tmp_path: Path) -> None:
    make = load("timm").create_model
    options = {"img_size": 32, "depth": 1, "embed_dim": 48}
    bare = make("vit_tiny_patch16_224", num_classes=0, **options)
    torch.save(bare.state_dict(), tmp_path / "w.pth")
    whole = make("vit_tiny_patch16_224", num_classes=10, **options)
    weights.load_state(whole, tmp_path / "w.pth", "vit")
    assert whole.num_classes == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm:vit_smal_patch16_224", "vit_small_patch16_224"),
        ("vit_smal_patch16_224", "vit_small_patch16_224"),
        ("hf:dinov22", "dinov2"),
        ("hf:DPTForDepthEstimatio", "DPTForDepthEstimation"),
        ("torchvision:vit_b_17", "vit_b_16"),
        ("detectr", "detector"),
        ("tim:vit_tiny", "no module 'tim'"),
        ("hf:./nowhere/config.json", "is not there"),
        ("no_such_module_at_all:make", "PYTHONPATH"),
    ],
)
def test_a_wrong_name_is_answered_with_near_ones(name: str, words: str) -> None:
    with pytest.raises(EventfulError) as refused:
        open_named(name)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 700  # no page of class names


# Sizes.


def test_a_size_is_one_side_or_two() -> None:
    assert parse_size("480x640") == (480, 640)
    assert parse_size("518") == 518
    assert parse_size("longest:518") == Longest(518)
    assert parse_size(None) is None
    for wrong in ("0", "x5", "1x2x3", "big", "-4", "longest:", "longest:4x5", "longest:big"):
        with pytest.raises(ConfigError, match="480x640"):
            parse_size(wrong)


@pytest.mark.parametrize("size", [64, (32, 80)])
def test_a_size_means_the_same_everywhere(tmp_path: Path, size: Any) -> None:
    """One number is a square, and pictures keep their shape, also for models of any shape."""
    pytest.importorskip("av")
    vit = load("timm").create_model("vit_tiny_patch16_224", depth=1).eval()
    frame = next(iter(eventful.read(videos.pan(tmp_path / "a.mp4", 2, size=(64, 96)), size=size)))
    told = (
        pytest.warns(SquareWarning, match="33% .*--size longest:64")
        if size == 64
        else nullcontext()
    )
    with told:
        ready = open_subject(vit, size=size).at(64, 96)
    prepared = ready.prepare([torch.zeros(3, 64, 96, dtype=torch.uint8)])
    assert prepared.frame.region == frame.region
    assert frame.region.height / frame.region.width == pytest.approx(64 / 96, abs=0.01)
    shapes = {
        tuple(frame.shape[-2:]),
        ready.size,
        inspect(vit, size).size,
        fitted_size((64, 96), in_words(size), (16, 16), 224),
        both_sides(size),
    }
    assert len(shapes) == 1


def test_the_shape_of_the_picture_is_asked_for_by_name(tmp_path: Path) -> None:
    vit = load("timm").create_model("vit_tiny_patch16_224", depth=1).eval()
    for size in (Longest(96), None):
        ready = open_subject(vit, size=size).at(120, 240)
        assert ready.size == ((48, 96) if size else (112, 224))
        whole = ready.prepare([torch.zeros(3, 120, 240, dtype=torch.uint8)]).frame.region
        assert (whole.height, whole.width) == ready.size  # nothing is padding
    vit_folder = folder(tmp_path / "vit", {**VIT, "model_type": "vit", "image_size": 64})
    for name in ("torchvision:vit_b_16", f"hf:{vit_folder}", "timm:xcit_nano_12_p16_224"):
        with pytest.raises(ConfigError, match="longest:64 takes the shape of the picture"):
            open_named(name, size=Longest(64), weightless=True)


def test_a_model_is_built_for_frames_that_are_not_square(tmp_path: Path) -> None:
    """A DINOv2 takes any size with the table it has; a ViT needs one of its own."""
    dino: Any = quietly(f"hf:{folder(tmp_path / 'a', DINO)}", size=(28, 70))
    assert dino.config.image_size == 56
    vit = {**VIT, "model_type": "vit", "image_size": 64, "patch_size": 16}
    made: Any = quietly(f"hf:{folder(tmp_path / 'b', vit)}", size=(32, 64))
    assert tuple(made.config.image_size) == (32, 64)
    for model, size in ((dino, (28, 70)), (made, (32, 64))):
        stream = Stream(convert(model))
        stream(torch.rand(1, 3, *size))
        assert stream.last is not None
    with pytest.raises(UnsupportedError, match="square frames alone"):
        quietly("torchvision:vit_b_16", size=(32, 64), weightless=True)


# The commands.

COMMANDS = {
    "inspect": ["inspect", "{model}", "--size", "{size}", "--json"],
    "run": ["run", "{model}", "world:7?frames=3", "--size", "{size}", "--no-video", "--no-report"],
    "visualize": ["visualize", "synthetic", "--model", "{model}", "--size", "{size}", "--frames=3"],
    "demo": ["demo", "world:7?frames=3", "--model", "{model}", "--size", "{size}", "--frames=2"],
    "calibrate": [
        *("calibrate", "{model}", "stress:enter", "--size", "{size}", "--frames=8"),
        *("--setting", "default", "--no-time", "--error", "9"),
    ],
    "bench video": [
        *("bench", "video", "stress:enter", "--model", "{model}", "--size", "{size}"),
        *("--frames=4", "--no-compile"),
    ],
    "bench": ["bench", "{model}", "--size={size}", "--frames=2", "--no-compile", "--preset=fast"],
}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *((command, "hf") for command in COMMANDS),
        *((command, "own") for command in ("inspect", "bench", "calibrate", "bench video")),
    ],
)
def test_every_command_takes_every_form(command, kind, tmp_path, own, here) -> None:  # noqa: F811
    for library in ("av", "PIL", "supervision", "matplotlib"):
        pytest.importorskip(library)
    model, size = f"hf:{folder(tmp_path / 'depth', DEPTH)}", "56x84"
    if kind == "own":
        model, size = "own_models_of_a_user:sized", "32x64"
    words = [word.format(model=model, size=size) for word in COMMANDS[command]]
    if command in ("run", "visualize", "demo"):
        words += ["--out", str(tmp_path / "out")]
    done = here(*words)
    assert done.returncode == 0, done.stderr + done.stdout
    if command == "inspect":
        assert json.loads(done.stdout)["size"] == [int(side) for side in size.split("x")]
    loud = "random weights" in done.stderr
    assert loud == (kind == "hf" and command != "inspect")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_a_traceback_or_a_page_of_names(command, tmp_path, here) -> None:  # noqa: F811
    pytest.importorskip("matplotlib")
    words = [word.format(model="hf:dinov22", size="64") for word in COMMANDS[command]]
    if command in ("run", "visualize", "demo"):
        words += ["--out", str(tmp_path / "out")]
    done = here(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "dinov2" in done.stderr
    assert len(done.stderr) < 900


def test_inspect_agrees_with_the_first_step(own: None, here: Run, tmp_path: Path) -> None:  # noqa: F811
    """It converts, and refuses its first frame, which it cuts into a batch."""
    done = here("inspect", "own_models_of_a_user:cut", "--size", "64x96", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["matched"] == 2
    model = quietly("own_models_of_a_user:cut", size=(64, 96))
    with pytest.raises(EventfulError) as refused:
        Stream(convert(model))(torch.rand(1, 3, 64, 96))
    assert report["refused"] == str(refused.value)


def test_inspect_takes_a_model_that_cuts_frames_itself(tmp_path: Path, here: Run) -> None:  # noqa: F811
    path = folder(tmp_path, DEPTH_PRO)
    done = here("inspect", f"hf:{path}", "--size", "64", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["matched"] == len(report["blocks"])
    Stream(convert(quietly(f"hf:{path}", size=64)))(torch.rand(1, 3, 64, 64))


def test_inspect_takes_a_structure_that_has_no_name(own: None, here: Run) -> None:  # noqa: F811
    done = here("inspect", "own_models_of_a_user:layers", "--size", "64x96", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert (report["matched"], report["tokens"]) == (2, 24)
    assert {block["adapter"] for block in report["blocks"]} == {"structure"}


def test_a_trial_takes_what_a_stream_takes() -> None:
    model: Any = quietly("timm:vit_tiny_patch16_224", weightless=True)
    assert refusal(model, (64, 96), (64, 96)) is None
    assert hollow.takes(model, 224)
    assert not hollow.takes(model, 100)
    made = hollow.without_weights(model)
    assert sum(weight.untyped_storage().nbytes() for weight in made.parameters()) < 10_000


def test_zeros_stand_for_products_alone() -> None:
    x = torch.rand(4, 5)
    with hollow.no_arithmetic():
        assert not (x @ x.T).any()
        assert torch.nn.functional.linear(x, torch.rand(7, 5)).shape == (4, 7)
        assert (x + 1).min() >= 1
    assert (x @ x.T).any()


def test_zeros_of_a_large_map_take_no_memory() -> None:
    """Of a gigabyte of zeros that nothing looks at, no page is made."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        pytest.skip("needs /proc")
    layer, frame = nn.Conv2d(3, 64, 1).requires_grad_(False), torch.zeros(1, 3, 2048, 2048)
    before = int(statm.read_text().split()[1])
    with hollow.no_arithmetic():
        made = layer(frame)
    grown = (int(statm.read_text().split()[1]) - before) * 4096
    assert made.numel() * made.element_size() == 1 << 30
    assert grown < 1 << 28
