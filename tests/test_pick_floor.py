"""A floor in `pick`: tokens above a low level fill up to a least number of tokens."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import eventful
from backends import DEVICE, also, backends, make, poison  # noqa: F401
from eventful import ops
from eventful.ops import eager, reference


def picks(error, level, cap, low, floor, forced):
    """The tokens of one stream that pass, how many wanted to, and how many may, in plain Python."""
    if not all(math.isfinite(e) for e in error):
        return [], 0, 0
    fixed = [n for n in range(len(error)) if n in forced]
    free = sorted((n for n in range(len(error)) if n not in forced), key=lambda n: (-error[n], n))
    passing = []
    for n in free:
        if error[n] > level or (error[n] > low and len(passing) < floor):
            passing.append(n)
    may = passing[: max(cap, 0)]
    wanted = len(may) if level == -math.inf else len(passing)
    return fixed + may, len(fixed) + wanted, len(fixed) + len(may)


def forced_of(tokens, prefix, suffix, period, turn):
    due = set() if period is None else {n for n in range(tokens) if n % period == turn % period}
    return due | set(range(prefix)) | set(range(max(tokens - suffix, 0), tokens))


class TestFloor:
    """Tokens above a low level fill up to a least number of tokens."""

    @backends("pick", independent=True)
    @pytest.mark.parametrize(
        "forced", [{}, {"prefix": 3, "suffix": 2, "period": 9}, also({"prefix": 1})]
    )
    @pytest.mark.parametrize(("tokens", "width"), [(50, 12), (70, 70), also(600, 300)])
    @pytest.mark.parametrize("seed", [0, also(1), also(2)])
    @pytest.mark.parametrize("leading", [True, also(False)])
    def test_streams(self, backend, forced, tokens, width, seed, leading, poison):
        draw = torch.Generator().manual_seed(seed)
        error = make(7, tokens, seed=seed).abs()
        error[1] = error[1].round(decimals=1)  # ties
        error[2, tokens // 2] = torch.nan
        level = torch.tensor([2.5, 2.0, 1.0, 0.5, 1.0, 2.5, -torch.inf])
        low = torch.tensor([1.0, 1.0, 0.1, 1.5, 0.2, torch.nan, 0.1])  # 3: above the level
        cap = torch.tensor([tokens, 20, 20, 15, 5, 9, 7])  # 4: below the floor
        floor = torch.randint(0, 30, (7,), generator=draw)
        floor[0], floor[4] = 29, 10  # 0: more than are above the low level
        turn = torch.arange(7) * 3
        rule = ops.PickRule(
            *(x.to(DEVICE) for x in (level, cap)), turn=turn.to(DEVICE), leading=leading,
            low=low.to(DEVICE), floor=floor.to(DEVICE), **forced,
        )  # fmt: skip
        report = torch.zeros(7, ops.REPORT, dtype=torch.int32, device=DEVICE)
        report[:, 1] = 1
        with eventful.use_backend(backend):
            picked = ops.pick(error, rule, width, report)
        for b in range(7):
            fixed = forced_of(
                tokens, forced.get("prefix", 0), forced.get("suffix", 0), forced.get("period"),
                int(turn[b]),
            )  # fmt: skip
            numbers = (float(level[b]), int(cap[b]), float(low[b]), int(floor[b]))
            index, wanted, allowed = picks(error[b].tolist(), *numbers, fixed)
            assert int(picked.count[b]) == min(allowed, width)
            assert picked.index[b, : min(allowed, width)].tolist() == index[:width]
            assert report[b, [0, 3]].tolist() == [wanted if leading else 0, allowed]

    @given(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=20),
        st.sampled_from([-math.inf, 0.0, 1.0, 2.5, math.inf]),
        st.integers(0, 12),
        st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]),
        st.integers(0, 12),
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([None, 1, 4])),
        st.sampled_from([False] * 9 + [True]),
    )
    @example([3.0, 2.0, 2.0, 1.0, 1.5, 0.5], 2.5, 9, 0.5, 3, (0, 0, None), False)  # of a tie, one
    @example([3.0, 2.0, 2.0, 1.0, 1.5, 0.5], 2.5, 2, 0.5, 4, (0, 1, None), False)  # the cap holds
    @example([3.0, 2.0, 2.0, 1.0, 1.5, 0.5], 2.5, 9, 1.5, 9, (1, 0, None), False)  # too few
    @example([3.0, 2.0, 2.0, 1.0, 1.5, 0.5], 0.5, 9, 1.5, 4, (1, 0, None), False)  # low > level
    def test_one_stream_on_the_host(self, values, level, cap, low, floor, forced, bad):
        prefix, suffix, period = forced
        values = [math.nan, *values[1:]] if bad else values
        index, wanted, allowed = picks(
            torch.tensor(values).tolist(), level, cap, low, floor,
            forced_of(len(values), prefix, suffix, period, 2),
        )  # fmt: skip
        rule = ops.PickRule(
            torch.tensor([level]), torch.tensor([cap]), prefix, suffix, period, torch.tensor([2]),
            low=torch.tensor([low]), floor=torch.tensor([floor]),
        )  # fmt: skip
        for backend in (reference, eager):
            report = torch.zeros(1, ops.REPORT, dtype=torch.int32)
            picked = backend.pick(torch.tensor([values]), rule, None, report)
            assert picked.index[0].tolist() == sorted(index)
            assert report[0, [0, 3]].tolist() == [wanted, allowed]

    def test_wanted_tokens(self):
        error = torch.tensor([[5.0, 1.0, 4.0, 3.0, 2.0, 0.5]]).expand(4, -1)
        level, cap = torch.full((4,), 3.5), torch.tensor([6, 6, 3, 6])
        low, floor = torch.full((4,), 1.5), torch.tensor([3, 6, 4, 1])
        wanted, allowed = ops.wanted_tokens(error, level, cap, None, low, floor)
        assert wanted.tolist() == [3, 4, 4, 2]
        assert allowed.tolist() == [3, 4, 3, 2]

    @backends("pick", independent=True)
    def test_a_floor_of_zero_is_none(self, backend):
        error, told = make(4, 50).abs(), []
        for more in ({}, {"low": torch.zeros(4, device=DEVICE), "floor": 0}):
            if more:
                more["floor"] = torch.zeros(4, dtype=torch.int64, device=DEVICE)
            level, cap = torch.full((4,), 0.7, device=DEVICE), torch.full((4,), 20, device=DEVICE)
            report = torch.zeros(4, ops.REPORT, dtype=torch.int32, device=DEVICE)
            with eventful.use_backend(backend):
                picked = ops.pick(error, ops.PickRule(level, cap, 1, **more), 30, report)
            told.append([x.tolist() for x in (picked.index, picked.count, picked.places, report)])
        assert told[0] == told[1]
