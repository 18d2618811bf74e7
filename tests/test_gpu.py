"""The same laws on a CUDA device: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

import eventful
import zoo_timm
import zoo_transformers
from clips import moving_square
from eventful import Config, NoiseThreshold, TopFraction, TopR
from eventful.config import PRESETS
from tolerances import assert_near

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("full_precision"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = {
    "vit": zoo_timm.ZOO["vit"],
    "sam": zoo_timm.ZOO["sam"],
    "dinov3": zoo_transformers.ZOO["dinov3"],
    "yolos": zoo_transformers.ZOO["yolos"],
}


@pytest.fixture(params=FAMILIES, autouse=True)
def entry(request):
    torch.manual_seed(7)
    return FAMILIES[request.param]


def run(entry, target, frame):
    with torch.no_grad():
        return entry.output(entry.call(target, frame.cuda()))


@pytest.mark.parametrize("preset", PRESETS)
def test_all_tokens_is_dense(entry, preset):
    model = entry.make().cuda()
    stream = eventful.Stream(eventful.convert(model, Config.preset(preset, TopR(10**6))))
    for frame in moving_square(20, entry.size, noise=0.05):
        got, expected = run(entry, stream, frame), run(entry, model, frame)
        assert_near(got, expected)


@pytest.mark.real_clock
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("policy", [TopFraction(0.3), NoiseThreshold()], ids=["top", "noise"])
def test_a_stream_moves_from_the_cpu_to_the_device(entry, preset, policy):
    model = eventful.convert(entry.make(), Config.preset(preset, policy))
    clip = moving_square(6, entry.size, noise=0.05)
    stream = eventful.Stream(model)
    with torch.no_grad():
        for frame in clip[:3]:
            entry.call(stream, frame)
    model.cuda()
    stream.to("cuda")
    assert {tensor.device.type for tensor in stream._state.tensors.values()} == {"cuda"}
    for frame in clip[3:]:
        assert torch.isfinite(run(entry, stream, frame)).all()
    assert stream.last.ms > 0


def test_half_products_are_fp16_on_cuda(entry):
    config = Config.paper(TopFraction(0.5), accumulate="half")
    stream = eventful.Stream(eventful.convert(entry.make().cuda(), config))
    for frame in moving_square(3, entry.size):
        assert torch.isfinite(run(entry, stream, frame)).all()
    kinds = {t.dtype for n, t in stream._state.tensors.items() if n.endswith("/sum")}
    assert kinds == {torch.float16}
