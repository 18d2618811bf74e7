"""Hooks on parts of converted blocks: those that a stream does not run are named in a warning."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from torch import nn

import eventful
from eventful import Config, Stream, StreamBatch, TopR

timm = pytest.importorskip("timm")
FRAMES = torch.rand(4, 1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def converted() -> nn.Module:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)
    return eventful.convert(vit.eval(), Config.fast(TopR(4)))


def seen_on(part: nn.Module) -> list[int]:
    seen: list[int] = []
    part.register_forward_hook(lambda module, args, output: seen.append(1))
    return seen


def test_a_hook_on_attention_is_not_ignored_in_silence(converted: nn.Module) -> None:
    seen = seen_on(converted.blocks[1].attn)
    stream = Stream(converted)
    with pytest.warns(UserWarning, match=r"blocks\.1\.attn has a hook, .* its Attention"):
        stream(FRAMES[0])
    assert not seen
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        for frame in FRAMES[1:]:
            stream(frame)
        Stream(copy.deepcopy(converted))


def test_a_hook_that_comes_later_is_noticed(converted: nn.Module) -> None:
    stream = Stream(converted)
    stream(FRAMES[0])
    converted.blocks[0].attn.register_forward_pre_hook(lambda module, args: None)
    with pytest.warns(UserWarning, match=r"blocks\.0\.attn has a hook"):
        stream(FRAMES[1])


@pytest.mark.parametrize("part", ["", "mlp", "mlp.fc1", "attn.qkv", "attn.proj", "norm1"])
def test_a_hook_that_is_run_is_not_warned_of(converted: nn.Module, part: str) -> None:
    seen = seen_on(converted.blocks[0].get_submodule(part))
    stream, batch = Stream(converted), StreamBatch(converted)
    batch.join("a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for frame in FRAMES:
            stream(frame)
            batch(frame)
    assert len(seen) == 2 * len(FRAMES)


def test_a_copy_judges_hooks_anew(converted: nn.Module) -> None:
    """Numbers of hooks are those of a process: in another one they may be of other hooks."""
    seen_on(converted.blocks[0].mlp)
    Stream(converted)(FRAMES[0])
    twin = copy.deepcopy(converted)
    judged = [vars(model.blocks[0])["forward"]._hooks._judged for model in (converted, twin)]
    assert [len(ids) for ids in judged] == [1, 0]


def test_steps_in_several_threads_do_not_warn_of_each_other(converted: nn.Module) -> None:
    waiting, going = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: object) -> None:
        if threading.current_thread() is first:
            waiting.set()
            going.wait(60)

    first = threading.Thread(target=lambda: Stream(converted)(FRAMES[0]))
    converted.blocks[0].attn.qkv.register_forward_pre_hook(wait)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.start()
        assert waiting.wait(60)
        try:
            Stream(converted)(FRAMES[0])
        finally:
            going.set()
            first.join()


def test_probes_are_taken_away(converted: nn.Module) -> None:
    seen_on(converted.blocks[0].mlp)
    Stream(converted)(FRAMES[0])
    assert not any(module._forward_pre_hooks for module in converted.modules())
