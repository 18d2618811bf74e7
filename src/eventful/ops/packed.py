"""Products with weights that are rearranged once, on a CPU in fp32.

Ahead of every product, the matrix library copies the weights into the order in which it reads
them. A dense step spreads that over all tokens of a frame. With 50 tokens it takes a fifth of the
product's time. oneDNN can keep the rearranged weights; on some processors it is also twice as fast
as the library that torch uses otherwise. The sums are the same, in another order.

oneDNN also makes code for every number of rows, half of which it never frees: about 0.6 MB for each
number and layer, and as much time as a product of a small model takes. What changed is another
number in every frame, so rows of zeros are added up to one of few numbers.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.ops.reference.maps import Lift, MapLayer
from eventful.ops.scratch import scratch

VARIABLE = "EVENTFUL_PACK"
LEAST = 1 << 17  # weights; of smaller layers the product takes next to no time
_ROWS = 64  # for which the weights are arranged; other numbers are served as well
ONEDNN: Any = torch.ops.mkldnn


class PackedWeight:
    """The weights (outputs, inputs) of one layer as oneDNN reads them.

    Attributes:
        weight: opaque to other operations.
    """

    def __init__(self, weight: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.weight: Tensor = ONEDNN._reorder_linear_weight(weight, _ROWS)

    def holds(self, weight: Tensor) -> bool:
        """Whether it was made from these values; torch does not count every write to a weight."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.equal(self.weight.to_dense(), weight)


# Streams have the same weights: what one of them rearranged serves all, as long as one is there.
_shared: WeakValueDictionary[tuple[int, ...], PackedWeight] = WeakValueDictionary()
_sharing = threading.Lock()


def packing_available() -> bool:
    """Whether this torch can keep rearranged weights; EVENTFUL_PACK=0 says not to."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return os.environ.get(VARIABLE, "1") not in ("0", "false", "no") and onednn_offers(*names)


def onednn_offers(*names: str) -> bool:
    """Whether this torch has these operations of oneDNN, and may use them."""
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and bool(torch.backends.mkldnn.enabled)
        and all(hasattr(ONEDNN, name) for name in names)
    )


def pack(weight: Tensor) -> PackedWeight | None:
    """The rearranged weights (outputs, inputs): those of another user if they are equal.

    None where they cannot be kept.
    """
    if not packing_available():
        return None
    with _sharing, torch.inference_mode(False), torch.no_grad():
        weight = weight.detach().contiguous()
        checksum = int(weight.view(torch.int32).sum(dtype=torch.int64))
        key = (*weight.shape, checksum)
        known = _shared.get(key)
        if known is None or not known.holds(weight):
            known = _shared[key] = PackedWeight(weight)
        return known


def served_rows(rows: int) -> int:
    """The next number of rows that code is made for: eight from each power of two to the next."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def packed_product(rows: Tensor, weight: PackedWeight, bias: Tensor | None, served: int) -> Tensor:
    """Rows (..., K) times weights (N, K), and a bias, computed with rows of zeros behind them.

    Args:
        served: rows to compute, at least as many as there are.
    """
    count = rows.numel() // rows.shape[-1]
    given = rows
    if served > count:
        given = F.pad(rows.reshape(-1, rows.shape[-1]), (0, 0, 0, served - count))
    result: Tensor = ONEDNN._linear_pointwise(given, weight.weight, bias, "none", [], "")
    return result[:count].view(*rows.shape[:-1], -1) if served > count else result


# The rearranged weights of layers of maps, by level, as long as there are the layers.
_layers: WeakKeyDictionary[Lift | MapLayer, dict[int, PackedWeight | None]] = WeakKeyDictionary()


def layer_weight(layer: Lift | MapLayer, level: int, matrix: Tensor) -> PackedWeight | None:
    """The rearranged weights of a layer, from its matrix (K, N) at a level; None to multiply by it.

    Made at the first call: the weights of a layer do not change.
    """
    serves = (
        matrix.dtype == torch.float32
        and matrix.device.type == "cpu"
        and matrix.numel() >= LEAST
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
    if not serves:
        return None
    known = _layers.setdefault(layer, {})
    if level not in known:
        known[level] = pack(matrix.T)
    return known[level]


def gathered_product(
    x: Tensor, index: Tensor, taps: int, matrix: Tensor, packed: PackedWeight | None
) -> Tensor:
    """Rows of x (P, C), `taps` side by side, times a matrix (taps * C, N).

    Args:
        index: (n * taps,) rows to take; -1 for a row of zeros.
        packed: the matrix rearranged, if it serves.

    Returns:
        (n, N), not kept anywhere.
    """
    count = len(index) // taps
    served = count if packed is None else served_rows(count)
    room = scratch("gathered rows", (served * taps, x.shape[1]), x)
    if room is None:
        rows = x.new_zeros(served * taps, x.shape[1])
        rows[: len(index)] = x.index_select(0, index.clamp_min(0))
    else:
        rows = room
        torch.index_select(x, 0, index.clamp_min(0), out=rows[: len(index)])
        rows[len(index) :].zero_()
    if taps > 1:
        rows.index_fill_(0, (index < 0).nonzero()[:, 0], 0)
    side = rows.view(served, taps * x.shape[1])
    if packed is None:
        return side @ matrix
    return packed_product(side, packed, None, served)[:count]
