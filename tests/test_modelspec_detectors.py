"""RF-DETR and LW-DETR by name: their default configs do not fit the library's own models."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest
import torch

import eventful
from commands import here  # noqa: F401
from eventful.errors import UnsupportedError
from eventful.modelspec.opening import open_named
from eventful.video.normalization import input_size
from eventful.video.synthetic import moving_objects

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")
if not hasattr(transformers, "RfDetrConfig"):
    pytest.skip("this transformers has no RF-DETR", allow_module_level=True)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        ("hf:RfDetrForObjectDetection", 560, 16 * 101),  # 518 in its config: 37 patches
        ("hf:rf_detr", 560, 16 * 101),
        ("hf:LwDetrForObjectDetection", 1024, 64 * 64),
        ("hf:lw_detr", 1024, 64 * 64),
    ],
)
def test_inspect_takes_the_detectors_as_the_library_makes_them(
    name: str, size: int, tokens: int, here: Run  # noqa: F811
) -> None:  # fmt: skip
    report = json.loads(here("inspect", name, "--json").stdout)
    assert report["refused"] is None
    assert (report["size"], report["tokens"]) == ([size, size], tokens)
    assert report["matched"] == len(report["blocks"]) > 0


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("hf:RfDetrForObjectDetection", "518", "560 x 560"),
        ("hf:RfDetrForObjectDetection", "448x600", "448 x 616"),
        ("hf:LwDetrForObjectDetection", "600", "640 x 640"),
    ],
)
def test_a_size_that_windows_cannot_share_is_answered_with_one_that_fits(
    name: str, wrong: str, right: str, here: Run  # noqa: F811
) -> None:  # fmt: skip
    done = here("inspect", name, "--size", wrong)
    assert done.returncode == 2
    assert f"does not fit, {right} does" in done.stderr.replace("\n", " ")


def small(kind: str) -> torch.nn.Module:
    inside = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    backbone = {
        "RfDetr": {"model_type": "rf_detr_dinov2", "image_size": 92, "num_windows": 2},
        "LwDetr": {"model_type": "lw_detr_vit", "image_size": 96, "num_windows": 4},
    }[kind]
    config = getattr(transformers, f"{kind}Config")(
        backbone_config={**backbone, **inside, "patch_size": 8, "out_indices": [1, 2]},
        d_model=32, decoder_layers=1, decoder_ffn_dim=32, num_queries=5,
        decoder_self_attention_heads=2, decoder_cross_attention_heads=2,
        **({"projector_scale_factors": [1.0]} if kind == "LwDetr" else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, f"{kind}ForObjectDetection")(config).eval()
    return model


@pytest.mark.parametrize("kind", ["RfDetr", "LwDetr"])
def test_the_size_that_is_chosen_runs_in_a_stream(kind: str) -> None:
    model = small(kind)
    assert input_size(model) == (96, 96)  # 92 px are 11 patches, for two windows
    report = eventful.inspect(model)
    assert report.size == (96, 96)
    stream = eventful.Stream(eventful.convert(model, eventful.Config.fast(eventful.Always())))
    for frame in moving_objects(3, report.size):
        with torch.no_grad():
            torch.testing.assert_close(stream(frame).logits, model(frame).logits)
    with pytest.raises(UnsupportedError, match="80 x 88 does not fit, 80 x 96 does"):
        eventful.Stream(eventful.convert(model))(torch.rand(1, 3, 80, 88))


def test_a_model_without_weights_holds_no_memory_that_nothing_filled() -> None:
    made = open_named("hf:LwDetrForObjectDetection", weightless=True).model
    stray = [weight for weight in made.parameters() if not weight.is_meta]
    assert all(not weight.any() for weight in stray)
