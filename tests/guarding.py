"""A stream to be misused, and the check that misuse left it as it was."""

from __future__ import annotations

import pytest
import torch

import eventful
import zoo_timm
from clips import moving_square
from eventful import Config, TopR

ENTRY = zoo_timm.ZOO["vit"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ENTRY.make()


@pytest.fixture
def clip():
    return moving_square(6, ENTRY.size, noise=0.05)


@pytest.fixture(params=["fast", "exact", "paper", "tokenwise", "stgt"])
def stream(request, model):
    return eventful.Stream(eventful.convert(model, Config.preset(request.param, TopR(4))))


def holds(stream):
    """A copy of all that shapes the stream's next frame."""
    state = {name: tensor.clone() for name, tensor in stream._state.tensors.items()}
    return state, list(stream._state.frames), stream.policy, stream._signature


def unchanged(stream, before):
    state, frames, policy, signature = before
    same = stream._state.tensors.keys() == state.keys() and all(
        torch.equal(stream._state[name], state[name]) for name in state
    )
    return same and (stream._state.frames, stream.policy, stream._signature) == (
        frames,
        policy,
        signature,
    )


def refused(stream, error, frame, match=None):
    """The step raises, and the stream is as it was."""
    before = holds(stream)
    with pytest.raises(error, match=match):
        stream(frame)
    assert unchanged(stream, before)
