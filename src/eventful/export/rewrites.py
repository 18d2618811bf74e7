"""Rewrites of a traced graph that keep copies of memory out of it.

None of them changes a value. Each leaves the graph as it is where its pattern is not met.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from eventful.surgery.patches import FEW_CHANNELS

_aten: Any = torch.ops.aten


def simplify(graph: Graph) -> None:
    """The rewrites for every target."""
    _select_by_views(graph)
    _flatten_by_views(graph)
    _slice_once(graph)
    graph.eliminate_dead_code()


def suit_onnxruntime(graph: Graph) -> None:
    """The rewrites for onnxruntime; OpenVINO is as fast, or faster, without them."""
    _embed_by_products(graph)
    _flatten_by_views(graph)
    _drop_batch(graph)
    graph.eliminate_dead_code()


def _calls(graph: Graph, *targets: Any) -> list[Any]:
    """Nodes that call one of the operators and have a tensor as their value."""
    return [
        node for node in list(graph.nodes)
        if node.op == "call_function" and node.target in targets
        and isinstance(node.meta.get("val"), torch.Tensor)
    ]  # fmt: skip


def _shape(node: Any) -> tuple[int, ...]:
    """The shape of a node's value; empty where it is not known."""
    return tuple(node.meta["val"].shape) if "val" in node.meta else ()


def _call(graph: Graph, before: Node, target: Any, args: tuple[Any, ...], value: Any) -> Node:
    """A new node in front of another."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    node.meta = {**before.meta, "val": value}
    return node


def _select_by_views(graph: Graph) -> None:
    """Replace `x[0]` of an axis of one by a view.

    The rules hold memory as (1, N, D) and write rows of (N, D). Runtimes copy the whole tensor for
    each `x[0]`, but not for a reshape.
    """
    for node in _calls(graph, _aten.select.int):
        source, dim, place = node.args
        if place not in (0, -1) or not _shape(source) or _shape(source)[dim] != 1:
            continue
        if source.target == _aten.unsqueeze.default and source.args[1] == dim == 0:
            node.replace_all_uses_with(source.args[0])
        else:
            view = _call(graph, node, _aten.squeeze.dim, (source, dim), node.meta["val"])
            node.replace_all_uses_with(view)
        graph.erase_node(node)


def _flatten_by_views(graph: Graph) -> None:
    """Turn a map (1, h, w, C) into tokens (1, h*w, C) by a view.

    Patch embeddings go by (1, C, h, w) and (1, C, h*w), which is two transposes that undo each
    other.
    """
    for node in _calls(graph, _aten.transpose.int):
        flat = node.args[0]
        if flat.target != _aten.view.default or len(_shape(flat)) != 3:
            continue
        moved = flat.args[0]
        rank = len(_shape(moved))
        if moved.target != _aten.permute.default or rank < 3:
            continue
        inner = list(range(1, rank - 1))
        if list(moved.args[1]) != [0, rank - 1, *inner] or sorted(_axes(node)) != [1, 2]:
            continue
        source = moved.args[0]
        if _shape(flat)[:2] != _shape(moved)[:2] or not source.meta["val"].is_contiguous():
            continue
        view = _call(
            graph, node, _aten.view.default, (source, list(_shape(node))), node.meta["val"]
        )
        node.replace_all_uses_with(view)


def _axes(transpose: Any) -> tuple[int, int]:
    """The axes that a transpose swaps, none negative."""
    rank = len(_shape(transpose))
    first, second = transpose.args[1:3]
    return first % rank, second % rank


def _slice_once(graph: Graph) -> None:
    """Replace a slice of a slice along the same axis by one."""
    for node in _calls(graph, _aten.slice.Tensor):
        source = node.args[0]
        if source.target != _aten.slice.Tensor:
            continue
        (whole, dim, first, last, step), (_, same, start, end, stride) = _cut(source), _cut(node)
        if dim != same or step != 1 or not _shape(whole):
            continue
        size = _shape(whole)[dim]
        first, last = _within(first, size), _within(last, size)
        length = max(last - first, 0)
        start, end = _within(start, length), _within(end, length)
        args = (whole, dim, first + start, first + end, stride)
        node.replace_all_uses_with(_call(graph, node, _aten.slice.Tensor, args, node.meta["val"]))


def _cut(node: Any) -> tuple[Any, int, int, int, int]:
    """The arguments of a slice, with those that were left out."""
    defaults: list[Any] = [None, 0, None, None, 1]
    source, dim, start, end, step = list(node.args) + defaults[len(node.args) :]
    return source, dim % len(_shape(node)), start or 0, 2**62 if end is None else end, step


def _within(place: int, size: int) -> int:
    """A place along an axis, as slices count it."""
    return min(max(place + size if place < 0 else place, 0), size)


def _embed_by_products(graph: Graph) -> None:
    """Embed patches by a product of their pixels, in place of a convolution without overlap.

    onnxruntime's convolution of three channels takes a quarter of a step of ViT-S.
    """
    for node in _calls(graph, _aten.conv2d.default):
        image, weight, bias, stride, padding, dilation, groups = _convolution(node)
        if not _shape(image) or weight.op != "placeholder":
            continue
        (batch, channels, high, wide), (width, _, *kernel) = _shape(image), _shape(weight)
        plain = channels <= FEW_CHANNELS and groups == 1 and not any(padding)
        if not plain or stride != kernel or dilation != [1, 1]:
            continue
        rows, columns = high // kernel[0], wide // kernel[1]

        def made(target: Any, *args: Any, before: Node = node) -> Node:
            return _applied(graph, before, target, args)

        for axis, size, whole in ((2, rows * kernel[0], high), (3, columns * kernel[1], wide)):
            if size != whole:
                image = made(_aten.slice.Tensor, image, axis, 0, size)
        sides = [batch, channels, rows, kernel[0], columns, kernel[1]]
        cells = made(_aten.view.default, image, sides)
        turned = made(_aten.permute.default, cells, [0, 2, 4, 1, 3, 5])
        length = channels * kernel[0] * kernel[1]
        patches = made(_aten.reshape.default, turned, [batch, rows, columns, length])
        matrix = made(_aten.view.default, weight, [width, length])
        tokens = made(_aten.linear.default, patches, matrix, bias)
        node.replace_all_uses_with(made(_aten.permute.default, tokens, [0, 3, 1, 2]))


def _convolution(node: Any) -> list[Any]:
    """The arguments of a convolution, with those that were left out."""
    defaults: list[Any] = [None, None, None, [1, 1], [0, 0], [1, 1], 1]
    return list(node.args) + defaults[len(node.args) :]


def _applied(graph: Graph, before: Node, target: Any, args: tuple[Any, ...]) -> Node:
    """A new node in front of another, with the value that its operator makes of the arguments."""
    values = [one.meta["val"] if isinstance(one, Node) else one for one in args]
    return _call(graph, before, target, args, target(*values))


def _drop_batch(graph: Graph) -> None:
    """Multiply (H, M, d) rather than (1, H, M, d), where a batch of one is all there is.

    onnxruntime reads heads where they are in (N, H, d), without a transposed copy of the whole
    memory, if the operands have three axes.
    """
    known: dict[Node, Node] = {}
    for node in _calls(graph, _aten.matmul.default):
        left, right = node.args[:2]
        if not all(len(_shape(one)) == 4 and _shape(one)[0] == 1 for one in (left, right, node)):
            continue
        parts = tuple(_without_batch(graph, one, node, known) for one in (left, right))
        flat = _call(graph, node, node.target, parts, node.meta["val"].squeeze(0))
        back = _call(graph, node, _aten.unsqueeze.default, (flat, 0), node.meta["val"])
        node.replace_all_uses_with(back)
        known[back] = flat


def _without_batch(graph: Graph, node: Any, before: Node, known: dict[Node, Node]) -> Node:
    """The value of a node (1, ...) without its first axis, made in front of a later node."""
    if node not in known:
        rule = _FLAT.get(node.target)
        rest = None if rule is None or node.kwargs else rule(node)
        value = node.meta["val"].squeeze(0)
        if rest is None:
            known[node] = _call(graph, before, _aten.squeeze.dim, (node, 0), value)
        else:
            source = _without_batch(graph, node.args[0], before, known)
            known[node] = _call(graph, before, node.target, (source, *rest), value)
    return known[node]


def _flat_transpose(node: Any) -> tuple[Any, ...] | None:
    axes = _axes(node)
    return None if 0 in axes else (axes[0] - 1, axes[1] - 1)


def _flat_view(node: Any) -> tuple[Any, ...] | None:
    return (list(_shape(node)[1:]),) if _shape(node.args[0])[:1] == (1,) else None


def _flat_product(node: Any) -> tuple[Any, ...] | None:
    return node.args[1:] if isinstance(node.args[1], int | float) else None


def _flat_softmax(node: Any) -> tuple[Any, ...] | None:
    dim = node.args[1] % len(_shape(node))
    return None if dim == 0 else (dim - 1, *node.args[2:])


# The arguments after the first, for a value without its first axis; None if they cannot be told.
_FLAT: dict[Any, Callable[[Any], tuple[Any, ...] | None]] = {
    _aten.transpose.int: _flat_transpose,
    _aten.view.default: _flat_view,
    _aten.mul.Tensor: _flat_product,
    _aten.softmax.int: _flat_softmax,
}


def narrow_sorts(graph: Graph) -> None:
    """Replace a sort of which the first few alone are used by a search for these.

    For formats whose TopK puts the lower index first among equals, as a stable sort does.
    """
    nodes: list[Any] = list(graph.nodes)
    for node in nodes:
        if node.op != "call_function" or node.target != _aten.sort.stable:
            continue
        named = {"dim": -1, "descending": False, **node.kwargs}
        dim, source = named["dim"], node.args[0]
        size = source.meta["val"].shape[dim]
        most = max((_end(use, dim, size) for part in node.users for use in part.users), default=0)
        if not 0 < most < size:
            continue
        shown = tuple(part.narrow(dim, 0, most) for part in node.meta["val"])
        arguments = (source, most, dim, named["descending"], True)
        found = _call(graph, node, _aten.topk.default, arguments, shown)
        for part in node.users:
            part.meta["val"] = shown[part.args[1]]
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def _end(use: Any, dim: int, size: int) -> int:
    """How many of the first elements along an axis a node reads; all if that is not known."""
    ends = {_aten.slice.Tensor: 3, _aten.select.int: 2}
    if use.target not in ends or len(use.args) <= ends[use.target]:
        return size
    rank, end = use.args[0].meta["val"].dim(), use.args[ends[use.target]]
    if use.args[1] % rank != dim % rank:  # `order[:, :M]` is two slices
        same = use.target == _aten.slice.Tensor
        return max((_end(later, dim, size) for later in use.users), default=0) if same else size
    if end < 0:
        return size
    return min(end + (use.target == _aten.select.int), size)
