"""Training with memory in the loop: its steps are those of a stream, and gradients flow."""

from __future__ import annotations

import pytest
import torch

import eventful
from eventful import Config, Stream, TopR
from eventful.models.vitdet import BackboneConfig
from eventful.models.vitdet.backbone import ViTDetBackbone
from eventful.paper.train.loop import as_image, flush, step
from tolerances import assert_near

PLAIN = {
    "context": None, "motion": False, "max_age": None, "protect": False, "scene_cut": None,
    "fallback": False,
}  # fmt: skip


@pytest.fixture
def trunk() -> ViTDetBackbone:
    """Windows that need padding, global blocks, relative position that matters."""
    torch.manual_seed(0)
    made = ViTDetBackbone(
        BackboneConfig(
            size=128, trained_size=128, dim=32, depth=4, heads=2, window=3, global_blocks=(1, 3),
            pretrained_grid=8, class_slot=False,
        )
    ).eval()  # fmt: skip
    for name, parameter in made.named_parameters():
        if "rel_pos" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def frames(count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    clip = [torch.randn(2, 3, 128, 128, generator=draw)]
    for number in range(1, count):
        frame = clip[-1].clone()
        frame[:, :, 16 * number : 16 * number + 32, 20:90] += 1.0
        clip.append(frame)
    return clip


def test_steps_are_those_of_streams(trunk):
    clip, r = frames(4), 8  # more change, so that none is chosen without
    with torch.no_grad():
        memory, got = flush(trunk, clip[0]), []
        got.append(as_image(memory, (8, 8)))
        for frame in clip[1:]:
            memory = step(trunk, memory, frame, r)
            got.append(as_image(memory, (8, 8)))
    model = eventful.convert(trunk, Config.fast(TopR(r), **PLAIN))
    for row in range(2):
        stream = Stream(model)
        for time, frame in enumerate(clip):
            assert_near(got[time][row : row + 1], stream(frame[row : row + 1]), "step", str(time))


def test_all_tokens_is_dense(trunk):
    clip = frames(2)
    with torch.no_grad():
        memory = step(trunk, flush(trunk, clip[0]), clip[1], 64)
        assert_near(as_image(memory, (8, 8)), trunk(clip[1]), "step")


def test_gradients_flow_through_selected_tokens_alone(trunk):
    clip = frames(2)
    with torch.no_grad():
        memory = flush(trunk, clip[0])
    pixels = clip[1].requires_grad_()
    made = step(trunk, memory.detached(), pixels, 5)
    made.output.square().sum().backward()
    error = (made.reference - memory.reference).norm(dim=-1)
    touched = pixels.grad.abs().unflatten(3, (8, 16)).unflatten(2, (8, 16)).sum(dim=(1, 3, 5))
    assert ((touched.flatten(1) > 0) == (error > 0)).all()
    assert int((error > 0).sum()) == 10
    for name, parameter in trunk.named_parameters():
        assert parameter.grad is not None, name
