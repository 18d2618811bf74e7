"""Devices, models and configs of steps that never ask the host."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import zoo_timm
import zoo_transformers
from eventful import Config, SceneCut
from tolerances import assert_near

FAMILIES = {
    "vit": zoo_timm.ZOO["vit"],
    "sam": zoo_timm.ZOO["sam"],
    "dinov3": zoo_transformers.ZOO["dinov3"],
    "yolos": zoo_transformers.ZOO["yolos"],
}
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])])
def device(request, monkeypatch):
    monkeypatch.setattr("eventful.engine.plan.DEVICES", {request.param})
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield request.param
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(params=FAMILIES)
def entry(request):
    torch.manual_seed(7)
    return FAMILIES[request.param]


@pytest.fixture
def vit():
    torch.manual_seed(7)
    return FAMILIES["vit"]


def outputs(entry, stepper, clip, device):
    with torch.no_grad():
        return [entry.output(entry.call(stepper, frame.to(device))) for frame in clip]


def near(got, expected, device, kind="step"):
    for t, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_near(a, b, kind, f"frame {t}")


RULES = {
    "exact": Config.exact,
    "exact, before norm": partial(Config.exact, gate="before-norm"),
    "operator query": partial(Config, gating="operator", attention="query", scene_cut=SceneCut()),
    "block": partial(Config, gating="block", max_age=20),
}
