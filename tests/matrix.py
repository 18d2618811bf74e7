"""Every path, way of falling back, size of model, rule and policy, and slices of their product."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eventful
import zoo_timm
from clips import moving_square
from eventful import Config, NoiseThreshold, Stream, Threshold, TopR
from eventful.cost.fallback import Fallback
from eventful.memory.slots import SlotState
from eventful.policies import Policy, refresh_period
from simulated import LARGE, Machine, large_vit


def large_windowed() -> nn.Module:
    """A SAM-like model with 600 tokens, ragged windows and resized tables."""
    torch.manual_seed(7)
    options = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 0, "global_pool": ""}
    model = zoo_timm.sam.VisionTransformerSAM(
        **options, img_size=160, patch_size=8, mlp_ratio=2, use_rel_pos=True, window_size=7,
        global_attn_indexes=(1,), neck_chans=16,
    )  # fmt: skip
    return zoo_timm.spread(model)


@dataclass(frozen=True)
class Subject:
    """A model to run, and what is known of it.

    Attributes:
        special: class tokens, ahead of the others.
        small: a budget of few tokens.
    """

    make: Callable[[], nn.Module]
    size: tuple[int, int]
    tokens: int
    depth: int
    special: int
    small: int
    windowed: bool = False


SUBJECTS = {
    "vit": Subject(lambda: zoo_timm.make(zoo_timm.ZOO["vit"]), (32, 40), 21, 3, 1, 4),
    "sam": Subject(lambda: zoo_timm.make(zoo_timm.ZOO["sam"]), (40, 56), 35, 3, 0, 4, True),
    "large": Subject(large_vit, LARGE, 601, 2, 1, 40),
    "large windowed": Subject(large_windowed, LARGE, 600, 2, 0, 40, True),
}
RULES: dict[str, Callable[..., Config]] = {
    "fast": Config.fast,
    "exact": Config.exact,
    "block": lambda policy, **options: Config(
        policy, gating="block", **{"max_age": 64, "fallback": True} | options
    ),
    "operator query": lambda policy, **options: Config(
        policy, gating="operator", **{"fallback": True} | options
    ),
}
POLICIES: dict[str, Callable[[Subject], Policy | None]] = {
    "noise": lambda subject: NoiseThreshold(),
    "threshold": lambda subject: Threshold(1.0),
    "top": lambda subject: TopR(subject.small),
    "all": lambda subject: TopR(10**6),
}
AXES: dict[str, Sequence[Any]] = {
    "path": ("plain", "resident"),
    "fallback": ("off", "still", "busy"),
    "model": tuple(SUBJECTS),
    "rule": tuple(RULES),
    "policy": tuple(POLICIES),
}


def possible(cell: dict[str, Any]) -> bool:
    """Gates around operators are never resident in windowed models: the same as plain steps."""
    operator = cell["rule"] in ("exact", "operator query")
    return not (cell["path"] == "resident" and operator and SUBJECTS[cell["model"]].windowed)


def pairwise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Few of the rows that hold every pair of values that any of them holds."""

    def pairs(row: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(row.items(), 2))

    left = set().union(*map(pairs, rows))
    chosen = []
    while left:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & left)))
        left -= pairs(chosen[-1])
    return chosen


def cells(**axes: Sequence[Any]) -> Any:
    """Parametrize `world` over the product of the axes; what pairs do not need is slow.

    Args:
        axes: values of an axis other than all of them, or of a further axis.
    """
    every = AXES | axes
    rows = [dict(zip(every, values, strict=True)) for values in itertools.product(*every.values())]
    rows = [row for row in rows if possible(row)]
    quick = pairwise(rows)
    params = [
        pytest.param(
            row,
            id="-".join(map(str, row.values())),
            marks=[] if row in quick else [pytest.mark.slow],
        )
        for row in rows
    ]
    return pytest.mark.parametrize("world", params, indirect=True)


def slower_than_dense(subject: Subject) -> Callable[[int], float]:
    """A first frame that seems quick, then eventful steps that take half as long again as dense.

    Streams soon begin to compare and settle on dense, except where eventful steps
    hold all tokens too: those take as long as dense and go on.
    """
    calls = itertools.count()

    def ms(count: int) -> float:
        if next(calls) < subject.depth:
            return 10.0
        return 100.0 if count >= subject.tokens else 150.0

    return ms


def erratic(subject: Subject, seed: int) -> Callable[[int], float]:
    """A first frame that seems quick, then random times."""
    make, calls = random.Random(seed), itertools.count()
    return lambda count: 10.0 if next(calls) < subject.depth else make.uniform(50.0, 200.0)


class World:
    """A model in one cell of the matrix.

    Attributes:
        model: the original, which moves the simulated clock.
        further: values of further axes.
    """

    def __init__(self, cell: dict[str, Any]) -> None:
        further = dict(cell)
        self.path, self.fallback, name, self.rule, self.chosen = (
            further.pop(axis) for axis in AXES
        )
        self.further = further
        self.subject = SUBJECTS[name]
        self.policy = POLICIES[self.chosen](self.subject)
        self.model = self.subject.make()
        self._dense = copy.deepcopy(self.model)

    @property
    def busy(self) -> bool:
        return self.fallback == "busy"

    def config(self, **options: Any) -> Config:
        options = {"fallback": self.fallback != "off"} | options
        return RULES[self.rule](self.policy, **options)

    def convert(self, config: Config | None = None) -> nn.Module:
        return eventful.convert(self.model, config or self.config())

    def stream(self, **options: Any) -> Stream:
        return Stream(self.convert(self.config(**options)))

    def check_path(self, stepper: Any) -> None:
        """The steps were those that the cell is about."""
        assert isinstance(stepper._state, SlotState) == (self.path == "resident")

    def clip(self, frames: int, seed: int = 0) -> list[Tensor]:
        return moving_square(frames, self.subject.size, noise=0.05, seed=seed)

    def dense(self, frame: Tensor) -> Tensor:
        with torch.no_grad():
            return self._dense(frame)

    def forced(self, config: Config, turn: int) -> int:
        """Tokens that pass whatever their error, `turn` frames after the last dense step."""
        passing = set(range(self.subject.special))
        if config.max_age is not None:
            period = refresh_period(config.max_age, self.subject.depth)
            every = (
                self.subject.tokens
            )  # by their place in the order of refreshes, special ones first
            passing |= {n for n in range(every) if n * min(period, every) // every == turn % period}
        return len(passing)

    def cap(self) -> int:
        """Most tokens to pass by their error."""
        tokens = self.subject.tokens
        caps = {"noise": math.ceil(tokens / 2), "top": self.subject.small}
        return caps.get(self.chosen, tokens)


@pytest.fixture
def world(request, monkeypatch, tmp_path):
    """The path and the clock of a cell; what steps cost is learned anew."""
    made = World(request.param)
    monkeypatch.setenv("EVENTFUL_CACHE", str(tmp_path))
    monkeypatch.setattr("eventful.cost.fallback.HOLD", 2)  # dense for a few frames only
    if made.path == "resident":
        monkeypatch.setattr("eventful.engine.plan.DEVICES", {"cpu"})
    clock: Any = nullcontext()
    if made.busy:
        # Few classes of steps, and one step of a class is enough: short clips have comparisons.
        monkeypatch.setattr("eventful.cost.times._BINS", 4)
        monkeypatch.setattr("eventful.cost.times.ENOUGH", 1)
        seed = made.further.get("seed")
        ms = slower_than_dense(made.subject) if seed is None else erratic(made.subject, seed)
        clock = Machine(ms)
        clock.watch(made.model)
    with clock:
        yield made


@pytest.fixture
def roomy(monkeypatch):
    """Resident steps have slots for all tokens: none has to wait for the next frame."""
    monkeypatch.setattr("eventful.engine.widths._FIRST_SHARE", 1.0)
    monkeypatch.setattr("eventful.engine.widths._MARGIN", 1000.0)


class Decisions:
    """Has streams run dense at the frames a test names, whatever the clock says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._dense = False

    def replay(
        self, step: Callable[[Tensor], Tensor], frames: Iterable[Tensor], dense: Iterable[bool]
    ) -> list[Tensor]:
        """Outputs of a stream whose step t runs dense where `dense[t]` says so."""
        with self._patch.context() as patch:
            patch.setattr(Fallback, "decide", lambda fallback, demand: self._dense)
            made = []
            for frame, self._dense in zip(frames, dense, strict=True):
                made.append(step(frame))
            return made


@pytest.fixture
def decisions(monkeypatch):
    return Decisions(monkeypatch)


def without_fallback(config: Config) -> Config:
    return replace(config, fallback=False)
