"""Counts against the recorded ones, against the paper's tables, and against their own laws."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eventful.cli import paper_tables as paper
from eventful.cli import reproduce
from eventful.config import Config
from eventful.cost.counting import (
    BlockShape,
    BlockWork,
    LinearCost,
    Operations,
    count_backbone,
    count_block,
    count_dense,
    count_frame_gate,
)
from eventful.cost.footprint import state_bytes
from eventful.cost.models import vitdet_b, vivit_b_spatial, vivit_b_temporal
from eventful.errors import ConfigError
from eventful.rules import attention as attentions

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "golden" / "counts.json").read_text()
)
TYPES = ("linear", "bias", "matmul", "einsum", "add", "gate", "accumulator", "motion")


@dataclass(frozen=True)
class Rule:
    gating: str = "operator"
    attention: str = "delta"
    overlap: str = "twice"
    windows: str = "all"


ATTENTION_OF_CLASS = {
    "Block": "dense",
    "EventfulTokenwiseBlock": "dense",
    "EventfulMatmul1Block": "delta-qk",
    "EventfulBlock": "delta",
}


def recorded(counts: dict[str, int]) -> Operations:
    assert set(counts) <= {f"{name}_flops" for name in TYPES}
    return Operations(**{name: counts.get(f"{name}_flops", 0) for name in TYPES})


def block_shape(meta: dict[str, Any], config: dict[str, Any], *, windowed: bool) -> BlockShape:
    grid = tuple(meta["input_size"])
    return BlockShape.plain(
        tokens=grid[0] * grid[1] + meta.get("has_class_token", False),
        dim=config["dim"],
        heads=config["heads"],
        mlp_ratio=config["mlp_ratio"],
        grid=grid,
        window=tuple(config["window_size"]) if windowed else None,
        relative=config.get("relative_embedding_size") is not None,
        pool=config.get("pool_size", 1),
    )


def blocks(meta: dict[str, Any]) -> list[tuple[BlockShape, Rule]]:
    """Shape and rule of every block of a case."""
    if meta["kind"] == "block":
        shape = block_shape(meta, meta, windowed="window_size" in meta)
        return [(shape, Rule(attention=ATTENTION_OF_CLASS[meta["block_class"]]))]
    windowed_class = meta["windowed_class"] or meta["block_class"]
    made = []
    for index in range(meta["depth"]):
        windowed = index in meta["window_indices"]
        shape = block_shape(meta, meta["block_config"], windowed=windowed)
        name = windowed_class if windowed else meta["block_class"]
        made.append((shape, Rule(attention=ATTENTION_OF_CLASS[name])))
    return made


def selected(meta: dict[str, Any], tokens: int) -> int:
    kind, value = meta["policy"]
    return {"top_r": value, "top_fraction": int(value * tokens)}[kind]


def inferred_keys(shape: BlockShape, counts: Operations) -> int:
    """M_k from the accumulator's count; the count of the matrix products then checks it."""
    keys, rest = divmod(counts.accumulator - 2 * shape.tokens * shape.width, shape.width)
    assert rest == 0
    assert 0 <= keys <= shape.keys
    return keys


def inferred_work(shape: BlockShape, counts: Operations) -> BlockWork:
    """The gates of a threshold step, from the accumulator, linear and bias counts.

    Matrix products, gates and additions are left to check; the projection and MLP gates use up
    the linear and bias counts, so for those two only whole numbers in range are checked.
    """
    qkv = inferred_keys(shape, counts)
    macs, biases = counts.linear / shape.dim**2, counts.bias / shape.dim
    mlp = (macs - biases) / 3  # 3 a + b + 8 c macs, 3 a + b + 5 c biases
    projection = biases - 3 * qkv - 5 * mlp
    assert {mlp, projection} <= set(range(shape.tokens + 1))
    return BlockWork(qkv, qkv, int(projection), int(mlp))


def work_of(meta: dict[str, Any], shape: BlockShape, counts: Operations) -> BlockWork:
    if meta["policy"][0] == "threshold":
        return inferred_work(shape, counts)
    keys = inferred_keys(shape, counts) if shape.pool > 1 else None
    return BlockWork.uniform(selected(meta, shape.tokens), keys)


@pytest.mark.parametrize("case", GOLDEN)
def test_recorded_counts_to_the_integer(case: str) -> None:
    meta = GOLDEN[case]
    made = blocks(meta)
    shapes = [shape for shape, _ in made]
    positions = count_backbone(shapes[:1]) + count_dense(shapes[0]) * -1
    assert len(meta["counts"]) == meta["frames"]
    for frame, entry in enumerate(meta["counts"]):
        expected = recorded(entry)
        counted = positions if meta["kind"] == "backbone" else Operations()
        for shape, rule in made:
            if frame == 0 or meta["policy"] is None:
                counted += count_dense(shape)
            else:
                counted += count_block(shape, rule, work_of(meta, shape, expected))
        assert counted == expected, (case, frame)


def test_still_frame_of_the_threshold_case_selects_nothing() -> None:
    meta = GOLDEN["full_threshold"]
    ((shape, _),) = blocks(meta)
    assert inferred_work(shape, recorded(meta["counts"][3])) == BlockWork(0, 0, 0, 0)


FIXED_BY_SHAPES = [c for c in paper.COSTS if c.h is None and c.variant != paper.SPATIOTEMPORAL]
ROWS = dict(zip(paper.COSTS, reproduce.count_rows(), strict=True))


def test_every_published_row_is_there() -> None:
    per_table = {name: sum(cost.table == name for cost in ROWS) for name in paper.TITLES}
    assert list(per_table.values()) == [8, 38, 8, 4, 16, 4]


def test_dense_and_vivit_costs_to_the_published_digit() -> None:
    for cost in FIXED_BY_SHAPES:
        if cost.variant in (paper.BASE, paper.SPATIAL) or cost.unit == "TFlops":
            assert round(ROWS[cost]["ours"], cost.decimals) == cost.value, cost


def test_table_c_prints_as_published() -> None:
    """One number, the frames of a clip, is fitted to 36 rows."""
    rows = {cost: row for cost, row in ROWS.items() if cost.table == paper.VITDET and cost.r}
    assert len(rows) == 36
    for cost, row in rows.items():
        assert f"{row['ours']:.{cost.decimals}f}" == f"{cost.value:.{cost.decimals}f}", cost


def test_costs_fixed_by_shapes() -> None:
    for cost in FIXED_BY_SHAPES:
        assert round(ROWS[cost]["ours"], cost.decimals) == cost.value, cost


def test_spatiotemporal_costs_lie_in_their_bracket() -> None:
    rows = [row for row in ROWS.values() if row["variant"] == paper.SPATIOTEMPORAL]
    assert len(rows) == 12
    for row in rows:
        assert row["ours"] is None
        assert row["low"] < row["paper"] < row["high"]


def test_json_of_counts(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.counts(as_json=True)
    rows = json.loads(capsys.readouterr().out)
    keys = {"table", "variant", "size", "r", "unit", "paper", "ours", "relative_difference"}
    assert rows == list(ROWS.values())
    assert all(keys <= row.keys() for row in rows)
    assert all("reason" in row for row in rows if row["ours"] is None)
    assert [row["h"] for row in rows if "h" in row] == [0.2, 1.0, 5.0]


def test_memory_figures(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.memory(as_json=True)
    rows = json.loads(capsys.readouterr().out)
    digits = {paper.TOKEN_STATE: 1, paper.ATTENTION_VITDET: 0, paper.ATTENTION_VIVIT: 1}
    as_printed = [row for row in rows if row["tokens"] != 401]
    assert len(as_printed) == 8
    assert all(round(row["ours"], digits[row["figure"]]) == row["paper"] for row in as_printed)
    assert [round(row["ours"], 2) for row in rows if row["tokens"] == 401] == [7.72, 3.86]


def test_text_reports_show_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    reproduce.counts(as_json=False)
    reproduce.memory(as_json=False)
    text = capsys.readouterr().out
    assert all(f"{c.value:.{c.decimals}f}" in text for c in paper.COSTS)
    assert "misprint" in text


ATTENTIONS = ("delta", "delta-qk", "delta-av", "dense", "exact", "query")
RULES = [
    *(Rule(attention=a, windows=w) for a in ATTENTIONS for w in ("all", "touched")),
    Rule(overlap="once"),
    Rule("block", "query", windows="touched"),
    Rule("frame", "query", windows="touched"),
]


@st.composite
def global_shapes(draw: st.DrawFn, max_pool: int = 1) -> BlockShape:
    grid = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    heads = draw(st.integers(1, 4))
    return BlockShape.plain(
        tokens=grid[0] * grid[1] + draw(st.integers(0, 3)),
        dim=heads * draw(st.integers(1, 16)),
        heads=heads,
        qkv_bias=draw(st.booleans()),
        grid=grid,
        relative=draw(st.booleans()),
        pool=draw(st.integers(1, max_pool)),
    )


@st.composite
def windowed_shapes(draw: st.DrawFn) -> BlockShape:
    shape = draw(global_shapes())
    height, width = shape.grid or (1, 1)
    window = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    return replace(shape, tokens=height * width, window=window)


any_shape = st.one_of(global_shapes(max_pool=3), windowed_shapes())


@given(any_shape, st.sampled_from(RULES))
def test_a_flush_is_the_dense_block(shape: BlockShape, rule: Rule) -> None:
    flush = replace(BlockWork.uniform(1), flush=True)
    assert count_block(shape, rule, flush) == count_dense(shape)


@given(any_shape)
def test_tokenwise_with_every_token_is_dense_plus_gates(shape: BlockShape) -> None:
    counted = count_block(shape, Rule(attention="dense"), BlockWork.uniform(shape.tokens))
    gates = 2 * shape.tokens * shape.dim + shape.tokens * shape.width
    assert counted == count_dense(shape) + Operations(gate=gates)


@given(global_shapes(max_pool=3), st.sampled_from(["operator", "block", "frame"]))
def test_query_and_exact_with_every_token_are_dense(shape: BlockShape, gating: str) -> None:
    work = BlockWork.uniform(shape.tokens, shape.keys)
    for attention in ("query", "exact") if gating == "operator" else ("query",):
        counted = count_block(shape, Rule(gating, attention), work)
        assert replace(counted, gate=0) == count_dense(shape)


@given(windowed_shapes(), st.sampled_from(ATTENTIONS))
def test_touching_every_window_is_computing_all(shape: BlockShape, attention: str) -> None:
    work = replace(BlockWork.uniform(shape.tokens), windows=shape.windows)
    every, touched = (
        count_block(shape, Rule(attention=attention, windows=w), work) for w in ("all", "touched")
    )
    if attention == "query":  # padding tokens ask nothing
        assert touched.total <= every.total
    else:
        assert touched == every


@given(any_shape, st.sampled_from(["exact", "query"]), st.sampled_from(["operator", "frame"]))
def test_a_still_frame_costs_only_gates_and_residuals(
    shape: BlockShape, attention: str, gating: str
) -> None:
    rule = Rule(gating, attention if gating == "operator" else "query", windows="touched")
    counted = count_block(shape, rule, BlockWork(0, 0, 0, 0, windows=0))
    if gating == "frame":
        assert counted == Operations()
    else:
        assert counted == Operations(add=counted.add, gate=counted.gate)
        assert counted.add == 2 * shape.tokens * shape.dim


@given(global_shapes(), st.data())
def test_overlap_once(shape: BlockShape, data: st.DataObject) -> None:
    """N M D (2 - M / N), where the paper says N M D; never more than the dense product."""
    tokens, m = shape.tokens, data.draw(st.integers(0, shape.tokens))
    dense_value = tokens * tokens * shape.width
    work = BlockWork.uniform(m)
    once = count_block(shape, Rule(attention="delta-qk", overlap="once"), work).matmul
    twice = count_block(shape, Rule(attention="delta-qk"), work).matmul
    assert once - dense_value == (2 * tokens - m) * m * shape.width
    assert twice - dense_value == 2 * tokens * m * shape.width
    assert once <= 2 * dense_value


@given(any_shape, st.data())
def test_query_grows_with_the_selection(shape: BlockShape, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, shape.tokens))
    for rule in (r for r in RULES if r.attention == "query"):
        fewer, more = (count_block(shape, rule, BlockWork.uniform(n)).total for n in (m - 1, m))
        assert fewer <= more


@given(global_shapes(), st.data())
def test_exact_pays_up_to_half_of_the_tokens(shape: BlockShape, data: st.DataObject) -> None:
    """2 M N + 4 (N - M) M products: rising to 3/4 N, and dense again at N / 2."""
    m = data.draw(st.integers(0, shape.tokens))
    rule = Rule(attention="exact")
    counted = count_block(shape, rule, BlockWork.uniform(m))
    assert (counted.matmul <= count_dense(shape).matmul) == (
        2 * m <= shape.tokens or m == shape.tokens
    )
    if 4 * (m + 1) <= 3 * shape.tokens:
        assert counted.total < count_block(shape, rule, BlockWork.uniform(m + 1)).total


@given(global_shapes(), st.data())
def test_rebased_rows_are_whole_rows(shape: BlockShape, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, shape.tokens))
    rebased = data.draw(st.integers(0, shape.tokens - m))
    rule, work = Rule(attention="exact"), BlockWork.uniform(m)
    counted = count_block(shape, rule, replace(work, rebased=rebased))
    extra = counted.matmul - count_block(shape, rule, work).matmul
    assert extra == 2 * rebased * shape.keys * shape.width


@given(any_shape, st.sampled_from(["twice", "once"]))
def test_the_products_are_separable(shape: BlockShape, overlap: str) -> None:
    """Making both products sparse saves what each saves alone."""
    work = BlockWork.uniform(min(2, shape.keys))

    def matmul(attention: str) -> int:
        return count_block(shape, Rule(attention=attention, overlap=overlap), work).matmul

    assert matmul("delta") + matmul("dense") == matmul("delta-qk") + matmul("delta-av")


operations = st.builds(Operations, *[st.integers(0, 10**15)] * len(TYPES))


@given(operations, operations, st.integers(0, 300))
def test_operations_add_up(a: Operations, b: Operations, times: int) -> None:
    assert (a + b).total == a.total + b.total
    assert a + b == b + a
    assert a * times == sum([a] * times, Operations())
    assert times * a == a * times
    assert Operations(**a.as_dict()) == a
    assert tuple(a.as_dict()) == TYPES


def test_linear_costs_add_up() -> None:
    layers = LinearCost.layer(8, 24) + LinearCost.layer(24, 8, bias=False)
    assert layers == LinearCost(macs=384, bias=24)


def test_shape_of_padded_windows() -> None:
    shape = vitdet_b(1024)[0]
    assert (shape.windows, shape.window_tokens, shape.padded) == (25, 196, True)
    assert (shape.keys, shape.extra, shape.width) == (4096, 0, 768)
    assert not vitdet_b(672)[0].padded


def test_pooling_spares_the_class_token_and_cut_cells() -> None:
    shape = BlockShape.plain(tokens=16, dim=8, heads=2, grid=(3, 5), pool=2)
    assert (shape.extra, shape.keys) == (1, 1 + 2 * 3)


def test_padding_token_needs_a_bias_and_a_computed_window() -> None:
    shape = BlockShape.plain(tokens=9, dim=8, heads=2, grid=(3, 3), window=(2, 2))
    plain = BlockShape.plain(tokens=9, dim=8, heads=2, grid=(3, 3), window=(2, 2), qkv_bias=False)
    assert count_dense(shape).bias - count_dense(plain).bias == 24 * (9 + 1)
    rule = Rule(attention="exact", windows="touched")
    assert count_block(shape, rule, BlockWork(0, 0, 0, 0, windows=0)).bias == 0


def test_token_counts_of_the_papers_models() -> None:
    assert [vivit_b_spatial(size)[0].tokens for size in (320, 224)] == [401, 197]
    assert [shape.tokens for shape in vivit_b_temporal()] == [17] * 4
    assert [shape.tokens for shape in vitdet_b(672)] == [1764] * 12
    assert [i for i, s in enumerate(vitdet_b(1024, pool=2)) if s.pool == 2] == [2, 5, 8, 11]


def test_frame_gate_is_counted_once_per_step() -> None:
    shapes, rule, still = vitdet_b(672), Rule("frame", "query"), BlockWork(0, 0, 0, 0)
    counted = count_backbone(shapes, rule, [still] * len(shapes))
    assert counted == count_frame_gate(1764, 768) + Operations(add=1764 * 768)
    flush = [replace(still, flush=True)] * len(shapes)
    assert count_backbone(shapes, rule, flush) == count_backbone(shapes)


def test_shapes_that_cannot_be_counted() -> None:
    with pytest.raises(ConfigError, match="grid"):
        BlockShape.plain(tokens=9, dim=8, heads=2, relative=True)
    with pytest.raises(ConfigError, match="pool"):
        BlockShape.plain(tokens=9, dim=8, heads=2, grid=(3, 3), window=(2, 2), pool=2)


@pytest.mark.parametrize("attention", sorted(attentions.RULES))
def test_every_rule_is_counted_and_its_memory_known(attention):
    shape = BlockShape.plain(tokens=17, dim=8, heads=2)
    assert count_block(shape, Rule(attention=attention), BlockWork.uniform(4)).total > 0
    config = Config(gating="operator", attention=attention)
    assert state_bytes([shape], config, torch.float32) > 0


def test_an_unknown_rule_is_not_counted_as_another():
    shape = BlockShape.plain(tokens=17, dim=8, heads=2)
    with pytest.raises(ConfigError, match="'new' are not counted"):
        count_block(shape, Rule(attention="new"), BlockWork.uniform(4))
