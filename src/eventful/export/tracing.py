"""torch.export of a step, and the small rewrites that keep copies of memory out of its graph."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eventful import ops
from eventful.errors import UnsupportedError

_aten: Any = torch.ops.aten


def traced(module: nn.Module, args: Sequence[Tensor], what: str) -> Any:
    """The `ExportedProgram` of a step.

    Args:
        what: the step in a few words, for messages.
    """
    try:
        with (
            warnings.catch_warnings(), torch.no_grad(), ops.use_backend("portable"), _no_masks(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            program = torch.export.export(module, tuple(args), strict=False)
            program = program.run_decompositions(_SIMPLER)
    except Exception as error:  # torch.export and the model's own code fail in many ways
        line = str(error).strip().partition("\n")[0]
        raise UnsupportedError(
            f"torch.export cannot trace {what} ({type(error).__name__}: {line}). Code of the model "
            "around its blocks must not depend on values; export a part without it, e.g. the "
            "backbone."
        ) from error
    simplify(program.graph_module.graph)
    program.graph_module.recompile()
    return program


def _median(values: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower of the middle two, as in torch: exporters know no median, but they do sort."""
    ordered, places = torch.sort(values, dim=dim, stable=True)
    at = (values.shape[dim] - 1) // 2
    found = ordered.narrow(dim, at, 1), places.narrow(dim, at, 1)
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def _argsort(values: Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> Tensor:
    return torch.sort(values, stable=stable, dim=dim, descending=descending)[1]


_SIMPLER: dict[Any, Any] = {_aten.median.dim: _median, _aten.argsort.stable: _argsort}


@contextmanager
def _no_masks() -> Iterator[None]:
    """While a model is exported, transformers passes masks of ones on, and blocks refuse masks.

    It does so because a mask that was given cannot be looked at then. None was given here.
    """
    module = sys.modules.get("transformers.masking_utils")
    name = "is_torchdynamo_exporting"
    before = getattr(module, name, None)
    if before is None:
        yield
        return
    setattr(module, name, lambda: False)
    try:
        yield
    finally:
        setattr(module, name, before)


def simplify(graph: torch.fx.Graph) -> None:
    """Replace `x[0]` of an axis of one by a view.

    The rules hold memory as (1, N, D) and write rows of (N, D). Runtimes copy the whole tensor for
    each `x[0]`, but not for a reshape.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target != _aten.select.int:
            continue
        source, dim, place = node.args
        value = source.meta.get("val")
        if value is None or value.shape[dim] != 1 or place not in (0, -1):
            continue
        if source.target == _aten.unsqueeze.default and source.args[1] == dim == 0:
            node.replace_all_uses_with(source.args[0])
        else:
            with graph.inserting_before(node):
                view = graph.call_function(_aten.squeeze.dim, (source, dim))
            view.meta = dict(node.meta)
            node.replace_all_uses_with(view)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def narrow_sorts(graph: torch.fx.Graph) -> None:
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
        with graph.inserting_before(node):
            arguments = (source, most, dim, named["descending"], True)
            found: Any = graph.call_function(_aten.topk.default, arguments)
        shown = [part.narrow(dim, 0, most) for part in node.meta["val"]]
        found.meta = {**node.meta, "val": tuple(shown)}
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
