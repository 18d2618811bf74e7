"""Linear layers with rearranged weights: the same results, never those of old weights."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from eventful import Config, Stream, TopR, convert, restore
from eventful.live import memory
from eventful.models.vivit.model import SpatialModel, ViViTConfig
from eventful.ops import packed
from eventful.surgery import linears
from tolerances import assert_near

pytestmark = pytest.mark.skipif(not packed.packing_available(), reason="needs oneDNN")
LAYERS = 2 * 4  # two blocks of four linear layers


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(linears, "LEAST", 1)
    torch.manual_seed(0)
    return SpatialModel(ViViTConfig(size=32, patch=8, dim=32, depth=2, heads=2)).eval()


@pytest.fixture
def clips():
    torch.manual_seed(1)
    return torch.randn(3, 1, 3, 2, 32, 32)


def steps(model, clips, config=None):
    stream = Stream(convert(model, config or Config.fast(TopR(4), fallback=False)))
    return stream, [stream(clip) for clip in clips]


def held():
    """The rearranged weights that something uses, with the identity of each."""
    gc.collect()
    return {key: id(value) for key, value in packed._shared.items()}


@pytest.mark.parametrize("preset", ["fast", "exact", "paper"])
def test_equals_plain_products(model, clips, monkeypatch, preset):
    config = Config.preset(preset, TopR(4), fallback=False)
    before = len(held())
    stream, made = steps(model, clips, config)
    assert len(held()) == before + LAYERS
    stream.close()
    del stream
    assert len(held()) == before
    monkeypatch.setenv(packed.VARIABLE, "0")
    plain, expected = steps(model, clips, config)
    assert len(held()) == before, plain
    for t, (one, other) in enumerate(zip(made, expected, strict=True)):
        assert_near(one, other, "step", f"frame {t}")


def test_outside_a_stream_the_layers_are_the_original_ones(model, clips):
    stream, _ = steps(model, clips)
    with torch.no_grad():
        assert torch.equal(stream.model(clips[0]), model(clips[0]))


def test_streams_share_the_weights_and_give_them_back(model, clips):
    before = held()
    first, _ = steps(model, clips)
    there = held()
    second = Stream(first.model)
    second(clips[0])
    other = Stream(convert(copy.deepcopy(model), Config.fast(TopR(4))))
    other(clips[0])
    assert held() == there
    first.close()
    other.close()
    assert held() == there
    second.close()
    assert held() == before


@pytest.mark.parametrize("change", [1.0, -2.0], ids=["another value", "another sign"])
@pytest.mark.parametrize("data", [False, True], ids=["counted by torch", "through .data"])
def test_written_weights_are_rearranged_anew(model, clips, data, change):
    other, _ = steps(model, clips)  # goes on holding the old ones
    stream = Stream(other.model)
    stream(clips[0])
    weight = model.blocks[1].mlp.fc2.weight
    with torch.no_grad():
        (weight.data if data else weight)[3] += change * weight[3]
    stream.reset()
    _, expected = steps(copy.deepcopy(model), clips)
    for clip, dense in zip(clips, expected, strict=True):
        assert torch.equal(stream(clip), dense)


def test_other_precisions_and_small_layers_stay(model, clips, monkeypatch):
    before = held()
    stream, _ = steps(model.to(torch.bfloat16), clips.bfloat16())
    assert held() == before
    stream = Stream(convert(model.float(), Config.fast(TopR(4), fallback=False)))
    with torch.autocast("cpu", torch.bfloat16):
        stream(clips[0])
    assert held() == before
    monkeypatch.setattr(linears, "LEAST", 1 << 17)
    assert not any(map(linears.can_pack, model.modules()))
    assert linears.can_pack(nn.Linear(384, 384))


def test_a_copy_gives_the_same_and_restore_removes_the_layers_forward(model, clips):
    stream, made = steps(model, clips)
    twin = copy.deepcopy(stream.model)
    again = Stream(twin)
    for clip, one in zip(clips, made, strict=True):
        assert torch.equal(again(clip), one)
    convert(model, Config.fast(TopR(4)), inplace=True)
    assert "forward" in vars(model.blocks[0].attn.qkv)
    restore(model)
    assert "forward" not in vars(model.blocks[0].attn.qkv)


def test_other_numbers_of_tokens_need_few_kinds_of_code(model, monkeypatch):
    """oneDNN keeps code for every number of rows for good: with one for each r, memory grows."""
    torch.manual_seed(0)
    large = SpatialModel(ViViTConfig(size=128, patch=8, dim=32, depth=2, heads=2)).eval()
    frames = torch.randn(60, 1, 3, 2, 128, 128)

    def run() -> list[torch.Tensor]:
        stream = Stream(convert(large, Config.fast(TopR(1), fallback=False, context=None)))
        outputs = []
        for r, frame in enumerate(frames, 40):
            stream.policy = TopR(r)
            outputs.append(stream(frame))
        return outputs

    monkeypatch.setenv(packed.VARIABLE, "0")
    expected = run()
    monkeypatch.delenv(packed.VARIABLE)
    seen = set()
    whole = linears.packed_product

    def watched(tokens, weight, bias, served):
        seen.add(served)
        return whole(tokens, weight, bias, served)

    monkeypatch.setattr(linears, "packed_product", watched)
    for t, (one, other) in enumerate(zip(run(), expected, strict=True)):
        assert_near(one, other, "step", f"frame {t}")
    tokens = 16 * 16 + 1
    assert tokens in seen  # all of them: as they are
    assert seen - {tokens} <= set(map(packed.served_rows, range(40, tokens)))
    assert len(seen) <= 1 + 12


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65, 100, 1000, 4097])
def test_few_rows_are_added(rows):
    served = packed.served_rows(rows)
    assert rows <= served <= rows * 1.125
    assert packed.served_rows(served) == served
    assert len(set(map(packed.served_rows, range(rows, 2 * rows)))) <= 17


GROWTH = """
import ctypes, json, random, torch, eventful
from eventful.live.memory import allocated_bytes
from eventful.live import memory
from eventful.models.vivit.model import SpatialModel, ViViTConfig

torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)
model = SpatialModel(ViViTConfig(size=256, patch=8, dim=384, depth=2, heads=6)).eval()
stream = eventful.Stream(eventful.convert(model, eventful.Config.fast(eventful.TopR(1))))
seen = []
for t in range(400):
    stream.policy = eventful.TopR(random.randint(20, 420))
    with torch.no_grad():
        stream(torch.randn(1, 3, 2, 256, 256))
    if t in (150, 399):
        seen.append(allocated_bytes() / 1e6)
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_numbers_of_tokens():
    """Each had 0.6 MB and more in each layer: some 100 MB in these steps."""
    if memory.allocated_bytes() is None:
        pytest.skip("needs glibc")
    environment = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
    command = [sys.executable, "-c", GROWTH]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    early, late = json.loads(done.stdout)
    assert late < early + 15
