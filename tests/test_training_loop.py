"""The loop on a toy: its journal, its shares of samples, what a look at the scores may not do."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eventful.errors import CheckpointError, ConfigError
from eventful.paper.train import checkpoints
from eventful.paper.train import journal as journals
from eventful.paper.train.engine import LoopOptions, StepProgress, Trainer
from eventful.paper.train.journal import Journal, read
from eventful.paper.train.processes import Processes
from eventful.paper.train.recipes import VID, Recipe
from eventful.paper.train.samples import Resumable

ALONE = Processes(0, 1, torch.device("cpu"))
RECIPE = Recipe(epochs=2, batch=2, lr=0.1, weight_decay=0.0)


class Numbers:
    """Six numbers; every sample is its own."""

    epoch = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        return float(index)


class Toy(nn.Module):
    """A weight pulled towards the samples, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        pull = torch.rand(3) * batch.mean()
        return {"near": (self.weight - pull).square().mean()}


def trainer(folder: Path, **options: object) -> Trainer:
    data, recipe = Numbers(), options.pop("recipe", RECIPE)
    return Trainer(Toy(), data, recipe, folder, ALONE, collate=torch.tensor, **options)


def test_scoring_does_not_change_what_is_learned(tmp_path: Path) -> None:
    plain, scored = trainer(tmp_path / "a"), trainer(
        tmp_path / "b", validate=lambda: {"luck": float(torch.rand(()))}
    )  # fmt: skip
    plain.fit()
    scored.fit()
    assert torch.equal(plain.objective.weight, scored.objective.weight)
    assert [r["step"] for r in read(tmp_path / "b/scalars.csv") if r["name"] == "val/luck"] == [
        "3",
        "6",
    ]


def test_every_step_is_reported(tmp_path: Path) -> None:
    reported: list[StepProgress] = []
    run = trainer(tmp_path)
    run.on_step = reported.append
    run.fit()
    assert [(m.step, m.steps, m.epoch) for m in reported] == [
        (1, 6, 0), (2, 6, 0), (3, 6, 0), (4, 6, 1), (5, 6, 1), (6, 6, 1),
    ]  # fmt: skip


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.fit()
    again, reported = trainer(tmp_path), []
    again.on_step = reported.append
    assert again.fit() == first.position
    assert reported == []
    assert torch.equal(again.objective.weight, first.objective.weight)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "other":
        torch.save({"weights": torch.zeros(2)}, path)
    else:
        path.write_bytes({"cut": content[:-700], "start": content[:40], "empty": b""}[how])


@pytest.mark.parametrize("how", ["cut", "start", "empty", "other"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(how: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.fit()
    folder = tmp_path / "stopped/checkpoints"
    trainer(tmp_path / "stopped", options=LoopOptions(save_every=1, keep=2, stop_after=5)).fit()
    names = [path.name for path in checkpoints.found(folder)]
    assert names == ["step_00000003.pt", "step_00000004.pt", "step_00000005.pt"]
    for name in names[1:]:
        damage(folder / name, how)
    (folder / "step_00000006.partial").write_bytes(b"killed while writing")

    again, reported = trainer(tmp_path / "stopped", options=LoopOptions(save_every=1, keep=1)), []
    again.on_step = lambda moment: reported.append(moment.step)
    with pytest.warns(UserWarning, match=r"step_0000000[45]\.pt is damaged.*step_00000003\.pt"):
        again.fit()
    assert reported == [4, 5, 6]
    assert torch.equal(again.objective.weight, whole.objective.weight)
    # Set aside, they do not crowd out the good ones.
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00000003.lasting",
        "step_00000003.pt",
        "step_00000004.damaged",
        "step_00000005.damaged",
        "step_00000006.lasting",
        "step_00000006.pt",
    ]


def test_nothing_but_damaged_checkpoints_is_an_error(tmp_path: Path) -> None:
    trainer(tmp_path, options=LoopOptions(save_every=1, stop_after=1)).fit()
    (path,) = checkpoints.found(tmp_path / "checkpoints")
    damage(path, "cut")
    with pytest.raises(CheckpointError, match=r"step_00000001\.pt is damaged.*start anew"):
        trainer(tmp_path).fit()
    assert path.exists()


def test_a_warm_up_and_a_fall_of_the_rate(tmp_path: Path) -> None:
    """The published schedule in small: a rise in equal parts, a tenth from the third epoch on."""
    recipe = replace(RECIPE, epochs=5, warmup=4, decay_epochs=VID.decay_epochs, lr=1.0)
    for stop in (4, 8, None):  # in the middle of epochs of three steps
        trainer(tmp_path, recipe=recipe, options=LoopOptions(1, log_every=1, stop_after=stop)).fit()
    rates = [float(r["value"]) for r in read(tmp_path / "scalars.csv") if r["name"] == "train/lr"]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, *[0.1] * 9])
    lasting = sorted(path.stem for path in (tmp_path / "checkpoints").glob("*.lasting"))
    assert lasting == [f"step_{3 * epoch:08d}" for epoch in range(1, 6)]  # one every epoch


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_the_batches_of_one(world: int) -> None:
    data = Numbers()

    def order(rank: int, of: int, done: int = 0) -> list[int]:
        sampler = Resumable(data, RECIPE, Processes(rank, of, torch.device("cpu")))
        sampler.set_epoch(1)
        sampler.done = done
        return list(sampler)

    whole = order(0, 1)
    assert sorted(whole) == list(range(6))
    shares = [order(rank, world) for rank in range(world)]
    assert [share[k] for k in range(6 // world) for share in shares] == whole
    assert order(0, world, done=world) == shares[0][1:]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer(tmp_path, options=LoopOptions(log_every=1)).fit()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    seen = board.Scalars("train/near")
    rows = [r for r in read(tmp_path / "scalars.csv") if r["name"] == "train/near"]
    assert [event.step for event in seen] == [int(row["step"]) for row in rows]
    assert [event.value for event in seen] == pytest.approx([float(r["value"]) for r in rows])


def test_without_tensorboard_the_table_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals.importlib.util, "find_spec", lambda name: None)
    trainer(tmp_path, options=LoopOptions(log_every=1)).fit()
    assert not (tmp_path / "tensorboard").exists()
    assert len([r for r in read(tmp_path / "scalars.csv") if r["name"] == "train/loss"]) == 6


def test_a_journal_drops_what_came_after_its_step(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    for step in (1, 2, 3):
        first.write(step, 0, {"x": step / 3})
    first.close()
    second = Journal(tmp_path, step=2)
    assert second.holds(2, "x")
    assert not second.holds(3, "x")
    second.close()
    assert [(r["step"], float(r["value"])) for r in read(second.path)] == [
        ("1", 1 / 3),
        ("2", 2 / 3),
    ]


def test_the_gradient_is_clipped(tmp_path: Path) -> None:
    one, two = trainer(tmp_path / "a"), trainer(tmp_path / "b", recipe=replace(RECIPE, clip=1e-12))
    one.fit()
    two.fit()
    assert not torch.equal(one.objective.weight, two.objective.weight)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch": 0},
        {"lr": 0.0},
        {"weight_decay": -1.0},
        {"layer_decay": 0.0},
        {"dropout": 1.0},
        {"clip": 0.0},
        {"precision": "int8"},
    ],
)
def test_recipes_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(RECIPE, **wrong)
