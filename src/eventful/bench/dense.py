"""The dense paths a user would pick, and which of them is fastest here."""

from __future__ import annotations

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
        paths["graph"] = _graphed(model, example)
    if compiled:
        mode = "max-autotune-no-cudagraphs" if example.is_cuda else "default"
        inner = torch.compile(model, mode=mode, dynamic=False)
        run = _no_grad(inner)
        run(example)
        paths["compile"] = _graphed(inner, example) if example.is_cuda else run
    return paths


def _no_grad(model: Callable[[Tensor], Tensor]) -> Forward:
    def run(frame: Tensor) -> Tensor:
        with torch.no_grad():
            return model(frame)

    return run


def _graphed(model: Callable[[Tensor], Tensor], example: Tensor) -> Forward:
    """A CUDA graph of the forward pass over a static input."""
    static = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        output = model(static)

    def run(frame: Tensor) -> Tensor:
        static.copy_(frame)
        graph.replay()
        return output

    return run
