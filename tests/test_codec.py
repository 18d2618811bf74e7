"""What benchmarks/codec measures: parts of a video that equal the last frame, and prototypes."""

# ruff: noqa: E402  (libraries that may be missing come first)
from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

av = pytest.importorskip("av")
timm = pytest.importorskip("timm")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eventful
from benchmarks.codec import blocks, gain, page

SIZE = (84, 112)


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """A still noisy picture on which a square moves, stored without loss."""
    path = tmp_path_factory.mktemp("codec") / "square.mkv"
    picture = np.random.default_rng(0).integers(60, 180, (120, 160, 3), dtype=np.uint8)
    with av.open(str(path), "w") as made:
        stream = made.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
        for number in range(8):
            shown = picture.copy()
            shown[40:56, 16 + 4 * number : 32 + 4 * number] = 250
            made.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        made.mux(stream.encode(None))
    return path


def test_no_token_changes_that_the_reach_of_scaling_leaves_out(video, monkeypatch):
    found = blocks.describe(video, SIZE, 8)
    assert found["wrong"] == 0
    assert 0.5 < found["tokens_source"] <= found["tokens"] < 1
    assert found["tokens"] < found["blocks"]  # a token reads pixels around its own, too
    monkeypatch.setattr(blocks, "CHROMA", -8)
    assert blocks.describe(video, SIZE, 8)["wrong"] > 0


def test_prototypes_update_the_same_tokens_and_return_the_same(video):
    torch.manual_seed(0)
    vit = timm.models.vision_transformer.VisionTransformer(
        img_size=SIZE, patch_size=blocks.PATCH, embed_dim=48, depth=2, num_heads=3, num_classes=0
    ).eval()
    model = eventful.convert(vit, eventful.Config.fast(fallback=False))
    found = gain.gain_of(gain.Clip(video, SIZE, 8), model, 1, time.perf_counter)
    assert 0 < found["updated"] < 1
    assert 0.5 < found["unchanged"] < 1
    for made in found["contenders"].values():
        assert made["same_counts"]
        assert made["furthest"] < 1e-5


def test_the_page_has_the_stored_numbers():
    text = page.PAGE.read_text()
    for table in page.tables(page.stored()).values():
        assert table in text, "python -m benchmarks.codec --table writes it anew"


def test_a_mask_that_costs_nothing_gains_less_than_the_page_says():
    runs = {page._of_processor(run): run for run in page.stored()}
    plain = [row["gain"] for row in runs[True]["rows"] if page._is_plain(row)]
    assert len(plain) == 4
    known = [gain["contenders"]["known"]["ratio"] for gain in plain]
    assert min(known) > 0.97
    assert f"at most {1 - min(known):.1%}".replace("%", " %") in page.PAGE.read_text()
    for run in page.stored():
        for row in run["rows"]:
            assert row["equal"]["wrong"] == 0
            made = row["gain"]["contenders"].values() if "gain" in row else ()
            assert all(one["same_counts"] and one["furthest"] < 2e-5 for one in made)
