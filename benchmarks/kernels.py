"""Microseconds of each kernel of a step, by graph replay: where a frame's time goes.

PYTHONPATH=src python benchmarks/kernels.py --out kernels.json      # needs a CUDA device
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from eventful import files, ops

SHAPES = [(1, 4096, 512, 12), (8, 4096, 512, 12), (16, 1369, 128, 12)]  # B, N, M, H


def replayed(work: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of one call, the median over replays of a graph of `repeats` calls."""
    stream = torch.cuda.Stream()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                work()
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / repeats)
    return sorted(times)[len(times) // 2]


def kernels(
    batch: int, tokens: int, count: int, heads: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The kernels of a fast and of an exact step, and the stock operators they replace."""
    width = heads * 64

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda")

    x, reference, key, value = (make(batch, tokens, width) for _ in range(4))
    q, k, v = make(batch, count, 3 * width).chunk(3, dim=-1)
    selected, hidden, weight = make(batch, count, width), make(batch, count, 4 * width), make(width)
    slots = torch.arange(batch, device="cuda")
    error = torch.rand(batch, tokens, device="cuda")
    report = torch.zeros(batch, ops.REPORT, dtype=torch.int32, device="cuda")
    cap = torch.full((batch,), count, device="cuda")
    rule = ops.PickRule(torch.zeros(batch, device="cuda"), cap, slots=slots)
    picked = ops.pick(error, rule, count, report)
    index, norm = picked.index, ops.LayerNorm(weight, weight, 1e-6)
    lse = make(batch, tokens, heads, dtype=torch.float32).abs() + 8
    out = make(batch, tokens, width, dtype=torch.float32)
    memory = ops.ExactMemory(x.clone(), key.clone(), value.clone(), out, lse, 1 + lse)
    old = ops.swap_rows_((key, value), (k, v), index, picked.count, slots)
    none = (index[:, :1], torch.zeros_like(cap))
    heads_of = [ops.split_heads(part, heads) for part in (q, key, value)]
    linear = {
        name: nn.Linear(a * width, b * width, dtype=torch.bfloat16, device="cuda")
        for name, a, b in (("qkv", 1, 3), ("project", 1, 1), ("fc1", 1, 4), ("fc2", 4, 1))
    }
    yield "error_norm", lambda: ops.error_norm(x, reference, 2.0, slots)
    yield "pick", lambda: ops.pick(error, rule, count, report)
    yield "topk (stock)", lambda: error.topk(count, dim=-1)
    yield "gate_error", lambda: ops.gate_error(x, reference, slots, norm)
    yield "gate_rows", lambda: ops.gate_rows(x, reference, index, picked.count, slots, norm)
    yield "write_rows", lambda: ops.write_rows_((key, value), (k, v), index, picked.count, slots)
    yield "add_norm", lambda: ops.add_norm(selected, selected, None, weight, weight, 1e-6)
    yield "layer_norm (stock)", lambda: F.layer_norm(selected, (width,), weight, weight)
    yield "gelu (stock)", lambda: F.gelu(hidden)
    for name, layer in linear.items():
        given = hidden if name == "fc2" else selected
        yield f"linear {name} (stock)", lambda layer=layer, given=given: layer(given)
    yield "attend", lambda: ops.attend(*heads_of, 0.125, slots=slots)
    yield "sdpa (stock)", lambda: F.scaled_dot_product_attention(*heads_of, scale=0.125)
    yield "exchange", lambda: ops.exchange_(memory, (k, v), old, picked, 0.125, 1e9, slots, 64)
    yield "recompute", lambda: ops.recompute_(memory, ((index, cap), none), 0.125, slots)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    chosen = parser.parse_args()
    rows = {}
    for shape in SHAPES:
        label = "B{} N{} M{} H{}".format(*shape)
        for name, work in kernels(*shape):
            rows[f"{label} {name}"] = round(replayed(work), 2)
            print(f"{rows[f'{label} {name}']:9.2f} us  {label}  {name}", flush=True)
    if chosen.out:
        files.write_json(chosen.out, rows)


if __name__ == "__main__":
    main()
