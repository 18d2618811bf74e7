"""Rewrites of traced graphs: the same bits, and the copies they are for are gone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eventful.export.rewrites import narrow_sorts, simplify, suit_onnxruntime

aten = torch.ops.aten


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def rewritten(function, *args, rewrite=simplify):
    """The targets of a function's graph before and after a rewrite; the bits must stay."""
    program = torch.export.export(Calls(function), args, strict=False).run_decompositions({})
    graph = program.graph_module.graph
    before = targets(graph)
    rewrite(graph)
    graph.lint()
    program.graph_module.recompile()
    expected, got = function(*args), program.module()(*args)
    for one, other in zip(together(expected), together(got), strict=True):
        assert torch.equal(one, other)
    return before, targets(graph)


def together(values):
    return values if isinstance(values, tuple) else (values,)


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_the_first_of_one_is_a_view():
    before, after = rewritten(lambda x: x[0] + 1, torch.rand(1, 5, 3))
    assert aten.select.int in before
    assert aten.select.int not in after


def test_the_first_of_two_stays():
    before, after = rewritten(lambda x: x[0] + 1, torch.rand(2, 5, 3))
    assert after == before


def test_a_select_of_an_unsqueeze_is_nothing():
    _, after = rewritten(lambda x: x[None][0] + 1, torch.rand(5, 3))
    assert after == [aten.add.Tensor]


def test_a_map_becomes_tokens_by_a_view():
    def tokens(x):  # (1, h, w, C)
        return x.permute(0, 3, 1, 2).flatten(2).transpose(1, 2)

    before, after = rewritten(tokens, torch.rand(1, 4, 6, 3))
    assert aten.permute.default in before
    assert after == [aten.view.default]


@pytest.mark.parametrize("swap", [lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 2)])
def test_other_transposes_of_a_map_stay(swap):
    def tokens(x):
        return swap(x.permute(0, 3, 1, 2).flatten(2))

    _, after = rewritten(tokens, torch.rand(1, 4, 6, 3))
    assert aten.permute.default in after


def test_a_map_that_is_not_contiguous_stays():
    def tokens(x):
        return x.transpose(1, 2).permute(0, 3, 1, 2).flatten(2).transpose(1, 2)

    _, after = rewritten(tokens, torch.rand(1, 4, 4, 3))
    assert aten.permute.default in after or aten.clone.default in after


@pytest.mark.parametrize("first", [slice(2, 9), slice(-8, None), slice(None, -2), slice(3, 3)])
@pytest.mark.parametrize("second", [slice(1, 4), slice(-3, None), slice(None, 100), slice(0, 5, 2)])
def test_a_slice_of_a_slice_is_one(first, second):
    before, after = rewritten(lambda x: x[:, first][:, second] + 1, torch.rand(2, 10, 3))
    assert after.count(aten.slice.Tensor) <= 1 <= before.count(aten.slice.Tensor)


@pytest.mark.parametrize("cut", [lambda x: x[:, ::2][:, 1:3], lambda x: x[:, 1:5][:, :, 1:2]])
def test_slices_with_steps_or_along_two_axes_stay(cut):
    before, after = rewritten(lambda x: cut(x) + 1, torch.rand(2, 10, 3))
    assert after.count(aten.slice.Tensor) == before.count(aten.slice.Tensor) == 2


def attention(q, k, v):
    """(1, M, C), (1, N, C), (1, N, C) with two heads."""
    q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2) for x in (q, k, v))
    rows = ((q * 0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
    return rows.transpose(1, 2).flatten(2)


def four_axes(graph):
    """Products of four axes."""
    products = [node for node in graph.nodes if node.target is aten.matmul.default]
    assert products
    return [node for node in products if node.meta["val"].dim() == 4]


@pytest.mark.parametrize(("batch", "left"), [(1, 0), (2, 2)])
def test_products_of_heads_lose_a_batch_of_one(batch, left):
    args = (torch.rand(batch, 5, 8), torch.rand(batch, 7, 8), torch.rand(batch, 7, 8))
    program = torch.export.export(Calls(attention), args, strict=False)
    graph = program.graph_module.graph
    assert len(four_axes(graph)) == 2
    suit_onnxruntime(graph)
    graph.lint()
    program.graph_module.recompile()
    assert len(four_axes(graph)) == left
    assert torch.equal(program.module()(*args), attention(*args))


def embedded(module, image):
    """Targets after the rewrites for onnxruntime; the values must stay."""
    program = torch.export.export(module, (image,), strict=False).run_decompositions({})
    graph = program.graph_module.graph
    suit_onnxruntime(graph)
    graph.lint()
    program.graph_module.recompile()
    torch.testing.assert_close(program.module()(image), module(image), rtol=1e-5, atol=1e-5)
    return targets(graph)


@pytest.mark.parametrize("size", [(20, 12), (23, 13)], ids=["whole patches", "a rest"])
@pytest.mark.parametrize(
    "patches",
    [nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(1, 8, (5, 3), stride=(5, 3), bias=False)],
    ids=repr,
)
def test_patches_are_embedded_by_a_product(patches, size):
    class Tokens(nn.Sequential):
        def forward(self, image):
            return self[0](image).flatten(2).transpose(1, 2)

    found = embedded(Tokens(patches), torch.rand(1, patches.in_channels, *size))
    assert aten.conv2d.default not in found
    assert found.count(aten.permute.default) == 1, "the tokens are turned and turned back"


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(3, 8, 4, stride=2),
        nn.Conv2d(3, 8, 4, stride=4, padding=1),
        nn.Conv2d(3, 8, 2, stride=2, dilation=2),
        nn.Conv2d(8, 8, 4, stride=4),
        nn.Conv2d(4, 8, 4, stride=4, groups=2),
    ],
    ids=repr,
)
def test_other_convolutions_stay(other):
    found = embedded(other, torch.rand(1, other.in_channels, 20, 12))
    assert aten.conv2d.default in found


def test_a_sort_of_which_few_are_used_is_a_search():
    def best(x):
        order = x.sort(dim=1, descending=True, stable=True)
        return order.values[:, :4], order.indices[:, :3]

    before, after = rewritten(best, torch.rand(2, 20), rewrite=narrow_sorts)
    assert aten.sort.stable in before
    assert aten.sort.stable not in after


def test_a_sort_that_is_used_whole_stays():
    def best(x):
        order = x.sort(dim=1, descending=True, stable=True)
        return order.values[:, :4], order.indices + 1

    before, after = rewritten(best, torch.rand(2, 20), rewrite=narrow_sorts)
    assert after == before
