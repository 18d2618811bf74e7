"""The dense paths a user would pick, and which of them is fastest here."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]


def dense_paths(model: nn.Module, example: Tensor, *, compiled: bool) -> dict[str, Forward]:
    """Ways to run the model whole, by name; all compute the same function in the same dtype.

    Args:
        compiled: also through `torch.compile`, on CUDA with CUDA graphs. Slow to prepare.
    """
    paths: dict[str, Forward] = {"eager": _no_grad(model)}
    if example.is_cuda:
        paths |= _graphed("graph", model, example)
    if compiled:
        mode = "max-autotune-no-cudagraphs" if example.is_cuda else "default"
        inner = torch.compile(model, mode=mode, dynamic=False)
        run = _no_grad(inner)
        run(example)
        paths["compile"] = run
        if example.is_cuda:
            paths |= _graphed("compile+graph", inner, example)
    return paths


def _no_grad(model: Callable[[Tensor], Tensor]) -> Forward:
    def run(frame: Tensor) -> Tensor:
        with torch.no_grad():
            return model(frame)

    return run


def _graphed(name: str, model: Callable[[Tensor], Tensor], example: Tensor) -> dict[str, Forward]:
    """A CUDA graph of the forward pass over a static input; none where the model defies capture."""
    static = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph), torch.no_grad():
            output = model(static)
    except RuntimeError as error:  # e.g. tables built on the host at every call
        warnings.warn(f"{name}: no CUDA graph of the dense model ({error})", stacklevel=2)
        torch.cuda.synchronize()
        return {}

    def run(frame: Tensor) -> Tensor:
        static.copy_(frame)
        graph.replay()
        return output

    return {name: run}
