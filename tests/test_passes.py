"""A step in two passes: outputs are joined stream by stream, or refused by name."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eventful
from eventful.engine.passes import Passes
from eventful.errors import UnsupportedError

CPU = torch.device("cpu")


def outputs(passes: Passes, make: Any) -> list[Any]:
    """What a model returns in each pass; `make` gets the streams of the pass."""
    return [make(rows) for rows in passes.rows]


def each(rows: list[int], *shape: int) -> Tensor:
    """A row for each stream, filled with its number."""
    return torch.stack([torch.full(shape, float(row)) for row in rows])


def numbers(joined: Tensor, axis: int = 0) -> list[float]:
    return joined.movedim(axis, 0).flatten(1)[:, 0].tolist()


SPLITS = [([1], [0]), ([2], [0, 1]), ([0, 2], [1, 3]), ([1, 2, 3], [0])]


@pytest.mark.parametrize("rows", SPLITS)
def test_every_container_keeps_its_structure(rows: tuple[list[int], list[int]]) -> None:
    passes = Passes(rows, CPU)
    pair = namedtuple("pair", "a b")

    def make(some: list[int]) -> Any:
        return {
            "logits": each(some, 3),
            "layers": (each(some, 5, 2), each(some, 5, 2)),
            "intermediate_logits": each(some, 4).expand(3, -1, -1).clone(),
            "pair": pair(each(some, 1), [each(some, 2)]),
            "none": None,
            "scale": 2,
            "dtype": torch.float32,
        }

    joined = passes.join(outputs(passes, make))
    order = [float(n) for n in range(sum(map(len, rows)))]
    assert numbers(joined["logits"]) == order
    assert type(joined["layers"]) is tuple
    assert [numbers(layer) for layer in joined["layers"]] == [order, order]
    intermediate = joined["intermediate_logits"]
    assert intermediate.shape == (3, len(order), 4)
    assert numbers(intermediate, 1) == order
    assert type(joined["pair"]) is pair
    assert numbers(joined["pair"].b[0]) == order
    assert (joined["none"], joined["scale"], joined["dtype"]) == (None, 2, torch.float32)


@pytest.mark.parametrize("rows", [([2], [0, 1]), ([1, 2, 3], [0])])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_length_that_follows_the_streams_is_one_each(
    rows: tuple[list[int], list[int]], kind: type
) -> None:
    """Whatever the entries hold: as many rows as streams, too."""
    passes = Passes(rows, CPU)
    for count in (1, 2, 7):
        joined = passes.join([kind(each([row] * count, 3) for row in some) for some in rows])
        assert type(joined) is kind
        assert [(len(t), float(t[0, 0])) for t in joined] == [
            (count, row) for row in range(sum(map(len, rows)))
        ]


@pytest.mark.parametrize("rows", SPLITS)
def test_a_list_by_stream_is_put_in_order(rows: tuple[list[int], list[int]]) -> None:
    found = Passes(rows, CPU).join([[{"id": row} for row in some] for some in rows])
    assert found == [{"id": row} for row in range(len(found))]
    tower = Passes(rows, CPU, features=True)
    for kind in (list, tuple):
        tokens = tower.join([kind(each([row] * 7, 3) for row in some) for some in rows])
        assert type(tokens) is kind
        assert [float(t[0, 0]) for t in tokens] == list(range(len(tokens)))


def refusal_of(passes: Passes, make: Any) -> str:
    with pytest.raises(UnsupportedError, match=r"batch\(frame, streams=\(name,\)\)") as refused:
        passes.join(outputs(passes, make))
    return str(refused.value)


@pytest.mark.parametrize("rows", [([0, 2], [1, 3]), ([3], [0, 1, 2])])
@pytest.mark.parametrize(
    ("make", "entry"),
    [
        (lambda some: {"x": each(some, 3), "table": torch.rand(10, 3)}, "the entry ['table']"),
        (lambda some: (each(some, 3), torch.rand(10, 3)), "the entry [1]"),
        (lambda some: {"scale": torch.tensor(3.0)}, "the entry ['scale']"),
        (lambda some: (torch.rand(10, 3), torch.rand(10, 3)), "the entry [0]"),
        (lambda some: {"who": object()}, "the entry ['who']"),
    ],
)
def test_an_entry_without_a_row_per_stream_is_named(
    make: Any, entry: str, rows: tuple[list[int], list[int]]
) -> None:
    """With two streams in a pass, a pair of tensors is not taken for one tensor per stream."""
    assert entry in refusal_of(Passes(rows, CPU), make)


def test_a_list_of_tensors_that_may_be_any_number_is_refused() -> None:
    """Passes of equally many streams do not tell one tensor per stream from always two."""
    passes = Passes(([0, 2], [1, 3]), CPU)
    refused = refusal_of(passes, lambda some: [torch.rand(10, 3) for _ in some])
    assert "the entry [0]" in refused


@pytest.mark.parametrize(
    ("make", "entry"),
    [
        (lambda some: {"boxes": tuple(range(len(some) + 1))}, "the entry ['boxes']"),
        (lambda some: {"count": 3 * len(some)}, "the entry ['count']"),
        (lambda some: {"a": {str(len(some)): each(some, 3)}}, "the entry ['a']"),
        (lambda some: {"a": each(some, 3), "b": None if some == [3] else some}, "the entry ['b']"),
        (lambda some: None if some == [3] else each(some, 3), "the model's output"),
    ],
)
def test_passes_that_differ_in_structure_are_refused(make: Any, entry: str) -> None:
    assert entry in refusal_of(Passes(([3], [0, 1, 2]), CPU), make)


def test_image_tokens_that_may_be_layers_are_refused() -> None:
    rows = ([0, 2], [1, 3])
    passes = Passes(rows, CPU, features=True)
    with pytest.raises(UnsupportedError, match="only some have such rows"):
        passes.join([[each(some, 3), *(torch.rand(9, 3) for _ in some[1:])] for some in rows])


class Beside(nn.Module):
    """A ViT whose output has an entry without streams."""

    def __init__(self) -> None:
        super().__init__()
        timm = pytest.importorskip("timm")
        self.vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=48)
        self.table = nn.Parameter(torch.rand(10, 48))

    def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        return self.vit.forward_features(frame), self.table


def test_a_batch_never_drops_streams() -> None:
    """Two streams join two others, and the output is a pair."""
    batch = eventful.StreamBatch(eventful.convert(Beside().eval()))
    batch.join("a"), batch.join("b")
    batch(torch.rand(2, 3, 32, 32))
    batch.join("c"), batch.join("d")
    with pytest.raises(UnsupportedError, match=r"entry \[1\].*a tensor \(10, 48\)"):
        batch(torch.rand(4, 3, 32, 32))
