"""torch.export of a step."""

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
from eventful.export.rewrites import simplify

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
