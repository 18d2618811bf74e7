"""torch.compile around and inside a converted model: it works in a stream, or is refused."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import pytest
import torch
from torch import nn

import eventful
from eventful import Config, Stream, TopR, errors
from guarding import clip, model  # noqa: F401

CONFIG = Config.fast(TopR(4))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps(made: nn.Module, clip):
    stream = Stream(made)
    found = [(stream(frame), stream.last.fraction) for frame in clip]
    return [output for output, _ in found], [share for _, share in found]


@pytest.fixture
def expected(model, clip):
    return steps(eventful.convert(model, CONFIG), clip)


def same(made, clip, expected):
    """Outputs and numbers of tokens are those of the model that is not compiled."""
    outputs, shares = steps(made, clip)
    for got, wanted in zip(outputs, expected[0], strict=True):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert shares == expected[1]
    assert max(shares[1:]) < 1


class Head(nn.Module):
    def forward(self, found):
        return 2 * found


class Tall(nn.Module):
    """A model with a head, as a user writes it."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit, self.head = vit, Head()
        self.eval()

    def forward(self, frame):
        return self.head(self.vit(frame)) / 2


class TestRefused:
    def test_a_compiled_converted_model(self, model):
        with pytest.raises(errors.ConfigError, match=r"compiled.*eventful\.Stream\(converted\)"):
            Stream(compiled(eventful.convert(model, CONFIG)))

    def test_a_compiled_model(self, model):
        with pytest.raises(errors.ConfigError, match="compiled"):
            eventful.convert(compiled(model), CONFIG)

    @pytest.mark.parametrize("place", ["", "blocks.1"])
    def test_compiled_in_place(self, model, place):
        converted = eventful.convert(model, CONFIG)
        converted.get_submodule(place).compile(backend="eager")
        with pytest.raises(errors.ConfigError, match=r"\.compile\(\)"):
            Stream(converted)

    @pytest.mark.parametrize("place", ["", "blocks.1"])
    def test_compiled_in_place_while_a_stream_runs(self, model, clip, place):
        converted = eventful.convert(model, CONFIG)
        stream = Stream(converted)
        stream(clip[0])
        part = converted.get_submodule(place)
        part.compile(backend="eager")
        with pytest.raises(errors.ConfigError, match=r"\.compile\(\)"):
            stream(clip[1])
        part._compiled_call_impl = None
        assert stream(clip[1]).isfinite().all()
        assert stream.last.fraction < 1

    def test_a_block_compiled_after_conversion(self, model):
        converted = eventful.convert(model, CONFIG)
        converted.blocks[1] = compiled(converted.blocks[1])
        with pytest.raises(errors.ConfigError, match=r"'blocks\.1'.*compiled"):
            Stream(converted)

    def test_a_block_compiled_while_a_stream_runs(self, model, clip):
        converted = eventful.convert(model, CONFIG)
        stream = Stream(converted)
        stream(clip[0])
        converted.blocks[1] = compiled(converted.blocks[1])
        with pytest.raises(errors.ConfigError, match=r"'blocks\.1'.*compiled"):
            stream(clip[1])

    def test_compiled_attention(self, model):
        converted = eventful.convert(model, CONFIG)
        for made, use in ((model, eventful.convert), (converted, Stream)):
            made.blocks[1].attn = compiled(made.blocks[1].attn)
            with pytest.raises(errors.ConfigError, match=r"'blocks\.1\.attn'.*compiled.*MLP"):
                use(made)

    def test_a_compiled_forward_of_a_block(self, model):
        converted = eventful.convert(model, CONFIG)
        block = converted.blocks[1]
        block.forward = torch.compile(block.forward, backend="eager")
        with pytest.raises(errors.EventfulError, match="compiled"):
            Stream(converted)


class TestWorks:
    @pytest.mark.parametrize("inplace", [False, True])
    def test_a_head(self, model, clip, expected, inplace):
        """It stays compiled in a stream."""
        ran = []

        def backend(graph, inputs):
            return lambda *args: ran.append(1) or graph.forward(*args)

        converted = eventful.convert(Tall(model), CONFIG)
        if inplace:
            converted.head.compile(backend=backend)
        else:
            converted.head = torch.compile(converted.head, backend=backend)
        same(converted, clip, expected)
        assert len(ran) == len(clip)

    @pytest.mark.parametrize("part", ["mlp", "norm1"])
    def test_a_part_of_a_block(self, model, clip, expected, part):
        block = model.blocks[1]
        setattr(block, part, compiled(getattr(block, part)))
        same(eventful.convert(model, CONFIG), clip, expected)

    def test_a_patch_embedding(self, model, clip, expected):
        """Motion looks at what it computes."""
        converted = eventful.convert(model, CONFIG)
        converted.patch_embed.compile(backend="eager")
        same(converted, clip, expected)

    def test_outside_a_stream_a_converted_model_can_be_compiled(self, model, clip):
        converted = eventful.convert(model, CONFIG)
        whole = compiled(converted)
        stream = Stream(converted)  # beside it, the model itself is stepped
        for frame in clip[:2]:
            with torch.no_grad():
                assert torch.allclose(whole(frame), model(frame), rtol=1e-4, atol=1e-5)
            stream(frame)
        assert stream.last.fraction < 1

    def test_a_compiled_function_may_call_a_stream(self, model, clip, expected):
        stream = Stream(eventful.convert(model, CONFIG))
        run = torch.compile(lambda frame: stream(2 * frame / 2) + 1, backend="eager")
        for frame, wanted in zip(clip[:2], expected[0], strict=False):
            assert torch.allclose(run(frame) - 1, wanted, rtol=1e-4, atol=1e-4)
        assert stream.last.fraction < 1
