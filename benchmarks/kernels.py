"""Microseconds of each kernel of a step, by graph replay: where a frame's time goes.

python benchmarks/kernels.py            # on a CUDA machine, from the repository's root
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from eventful import ops
from eventful.ops.triton import attention


def replayed(work: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of one call, from replays of a graph of `repeats` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                work()
        times = []
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / repeats)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    chosen = parser.parse_args()
    rows: dict[str, float] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        try:
            rows[name] = round(replayed(work), 2)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:150]}", flush=True)
            return
        print(f"{rows[name]:9.2f} us  {name}", flush=True)

    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    for batch, tokens, count, heads in [
        (1, 4096, 512, 12),
        (8, 4096, 512, 12),
        (16, 1369, 128, 12),
    ]:
        width = heads * 64
        label = f"B{batch} N{tokens} M{count}"
        x, memory = (
            torch.randn(batch, tokens, width, **kind),
            torch.randn(batch, tokens, width, **kind),
        )
        value_memory = torch.randn_like(memory)
        packed = torch.randn(batch, count, 3 * width, **kind)
        q, k, v = packed.chunk(3, dim=-1)
        slots = torch.arange(batch, device="cuda")
        error = torch.rand(batch, tokens, device="cuda")
        report = torch.zeros(batch, 3, dtype=torch.int32, device="cuda")
        rule = ops.PickRule(
            torch.zeros(batch, device="cuda"), torch.full((batch,), count, device="cuda"),
            turn=torch.zeros(batch, dtype=torch.int64, device="cuda"), period=59,
            scene=torch.rand(batch, device="cuda"), cut=(4.0, 0.5, 0.9), slots=slots,
        )  # fmt: skip
        index = ops.pick(error, rule, count, report).index
        selected = torch.randn(batch, count, width, **kind)
        weight = torch.randn(width, **kind)
        note(f"{label} error_norm", lambda: ops.error_norm(x, memory, 2.0, slots))
        note(f"{label} pick", lambda: ops.pick(error, rule, count, report))
        note(f"{label} topk (stock)", lambda: error.topk(count, dim=-1))
        note(f"{label} gather", lambda: ops.gather(x, index))
        note(
            f"{label} write_rows K+V",
            lambda: ops.write_rows_((memory, value_memory), (k, v), index, None, slots),
        )
        note(f"{label} add_norm", lambda: ops.add_norm(selected, selected, weight, weight, 1e-6))
        note(
            f"{label} layer_norm (stock)", lambda: F.layer_norm(selected, (width,), weight, weight)
        )
        hidden = torch.randn(batch, count, 4 * width, **kind)
        note(f"{label} gelu (stock)", lambda: F.gelu(hidden))
        for name, out in (("qkv", 3), ("proj", 1), ("fc1", 4)):
            layer = torch.nn.Linear(width, out * width, **kind)
            note(f"{label} linear {name}", lambda layer=layer: layer(selected))
        layer = torch.nn.Linear(4 * width, width, **kind)
        note(f"{label} linear fc2", lambda: layer(hidden))
        qh, kh, vh = (ops.split_heads(part, heads) for part in (q, memory, value_memory))
        note(f"{label} attend", lambda: ops.attend(qh, kh, vh, 0.125, slots=slots))
        for backend in (None, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

            def stock(backend=backend):
                with sdpa_kernel(backend) if backend else nullcontext():
                    return F.scaled_dot_product_attention(qh, kh, vh, scale=0.125)

            note(f"{label} sdpa {backend.name if backend else 'default'}", stock)
        if chosen.tune:
            for lanes, taken, warps, stages, splits in itertools.product(
                (64, 128), (64, 128), (4, 8), (2, 3, 4), (1, 2, 3, 4, 6, 8)
            ):
                if (taken == 64 and warps == 8) or (batch > 1 and splits > 2):
                    continue
                note(
                    f"{label} attend lanes={lanes} rows={taken} warps={warps} stages={stages} "
                    f"splits={splits}",
                    lambda l=lanes, r=taken, w=warps, g=stages, p=splits: attention.run(
                        qh, kh, vh, 0.125, None, slots, with_lse=False, lanes=l, rows=r, warps=w,
                        stages=g, splits=p,
                    ),
                )  # fmt: skip
    if chosen.out:
        chosen.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
