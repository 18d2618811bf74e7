"""The training loop with checkpoints; an interrupted run resumes exactly where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eventful import files
from eventful.errors import CheckpointError, ConfigError, NonFiniteError
from eventful.paper.train import checkpoints
from eventful.paper.train.checkpoints import Checkpoint, Position
from eventful.paper.train.journal import Journal
from eventful.paper.train.processes import Processes
from eventful.paper.train.recipes import Recipe
from eventful.paper.train.samples import Samples, loader

Groups = Iterable[dict[str, Any]]  # parameters, each group with its share `scale` of the rate
Validate = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class StepProgress:
    """What `on_step` receives after every step."""

    step: int
    steps: int
    epoch: int
    loss: float


@dataclass(frozen=True)
class LoopOptions:
    """Options of the loop that do not change the trained weights.

    Attributes:
        save_every: steps between checkpoints, besides those at the end of every epoch.
        keep: checkpoints within epochs to keep.
        log_every: steps between logged scalars.
        workers: processes that prepare samples.
        stop_after: stop after this step as if killed, for tests; None to train to the end.
        seconds: write a checkpoint and stop after so long; None to train to the end.
        shard: most bytes of a file of a checkpoint; None for one file.
    """

    save_every: int | None = None
    keep: int = 2
    log_every: int = 10
    workers: int = 0
    stop_after: int | None = None
    seconds: float | None = None
    shard: int | None = None


class Trainer:
    """One run in one folder.

    Resumes from the checkpoints of the folder. On the CPU the final weights are then bit for bit
    those of a run without interruption.

    Args:
        objective: its forward takes a batch and returns losses by name, to be added up. If its
            attribute `partial` is true, some parameters may have no gradient.
        groups: parameters to train, in groups with their share `scale` of the learning rate.
        about: settings besides the recipe; a run resumes only if they are equal.
        validate: scores after each epoch, called in every process.

    Attributes:
        on_step: called after every step in the first process; may be assigned.
    """

    def __init__(
        self,
        objective: nn.Module,
        data: Samples,
        recipe: Recipe,
        folder: Path,
        processes: Processes,
        *,
        collate: Callable[[Sequence[Any]], Any],
        groups: Groups | None = None,
        about: dict[str, Any] | None = None,
        validate: Validate | None = None,
        options: LoopOptions | None = None,
    ) -> None:
        if recipe.batch % processes.world:
            raise ConfigError(
                f"A batch of {recipe.batch} cannot be shared by {processes.world} processes; "
                "choose a multiple."
            )
        if not len(data):
            raise ConfigError("There is nothing to train on: the dataset is empty.")
        self.recipe, self.folder, self.processes = recipe, folder, processes
        self.options, self.data = options or LoopOptions(), data
        self.validate = validate
        self.on_step: Callable[[StepProgress], None] = lambda _: None
        # Through JSON, so that it compares equal to the content of a checkpoint.
        self.about = json.loads(json.dumps({"recipe": recipe.to_dict(), **(about or {})}))
        self.objective = objective.to(processes.device)
        self.optimizer = self._optimizer(groups)
        half = recipe.precision == "float16"
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=half)
        self.batches, self.sampler = loader(data, recipe, processes, collate, self.options.workers)
        self.position = Position()
        self._began = 0.0

    def _optimizer(self, groups: Groups | None) -> torch.optim.Optimizer:
        if groups is None:
            groups = [{"params": [p for p in self.objective.parameters() if p.requires_grad]}]
        made = [{"scale": 1.0, **group} for group in groups]
        recipe = self.recipe
        return torch.optim.AdamW(made, lr=recipe.lr, weight_decay=recipe.weight_decay)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.recipe.epochs * len(self.batches)

    def fit(self) -> Position:
        """Train to the end, from the newest checkpoint of the folder if there is one."""
        torch.manual_seed(self.recipe.seed + self.processes.rank)
        self._began = time.monotonic()
        self._resume()
        journal = Journal(self.folder, self.position.step) if self.processes.first else None
        if self.processes.first:
            files.write_json(self.folder / "settings.json", self.about)
        module = self._parallel()
        try:
            self._catch_up(journal)
            for epoch in range(self.position.epoch, self.recipe.epochs):
                if not self._epoch(module, epoch, journal):
                    break
        finally:
            if journal is not None:
                journal.close()
        return self.position

    def _parallel(self) -> nn.Module:
        if self.processes.world == 1:
            return self.objective
        device = self.processes.device
        return DistributedDataParallel(
            self.objective,
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=bool(getattr(self.objective, "partial", False)),
        )

    def _epoch(self, module: nn.Module, epoch: int, journal: Journal | None) -> bool:
        """One epoch, or the rest of it; False if the run must stop."""
        self.data.epoch = epoch
        self.sampler.set_epoch(epoch)
        self.sampler.done = self.position.samples
        self.objective.train()
        options = self.options
        for batch in self.batches:
            losses = self._step(module, batch, epoch)
            step = self.position.step + 1
            self.position = Position(step, epoch, self.position.samples + self.recipe.batch)
            if step % options.log_every == 0 or step == self.steps:
                values = self._shared(losses)
                if journal is not None:
                    rate = self.optimizer.param_groups[-1]["lr"]
                    journal.write(step, epoch, {**_named(values, "train"), "train/lr": rate})
            if self.processes.first:
                self.on_step(StepProgress(step, self.steps, epoch, float(sum(losses.values()))))
            if options.save_every and step % options.save_every == 0:
                self._save(lasting=False)
            if options.stop_after is not None and step >= options.stop_after:
                return False
            if self._late():
                self._save(lasting=False)
                return False
        self.position = Position(self.position.step, epoch + 1, 0)
        self._finish(epoch, journal)
        return True

    def _late(self) -> bool:
        """Whether the time of the run is over, by the clock of the first process."""
        if self.options.seconds is None:
            return False
        over = time.monotonic() - self._began > self.options.seconds
        return bool(self.processes.gather(over)[0])

    def _step(self, module: nn.Module, batch: Any, epoch: int) -> dict[str, Tensor]:
        recipe, device = self.recipe, self.processes.device
        rate = recipe.rate(self.position.step, epoch, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.lr * rate * group["scale"]
        dtype = getattr(torch, recipe.precision)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            losses: dict[str, Tensor] = module(_moved(batch, device))
        total = torch.stack([loss.float() for loss in losses.values()]).sum()
        if not torch.isfinite(total):
            raise NonFiniteError(
                f"The loss is {total.item()} at step {self.position.step + 1}. Lower the learning "
                "rate, clip the gradient or compute in bfloat16; the last checkpoint is intact."
            )
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(total).backward()
        if recipe.clip is not None:
            self.scaler.unscale_(self.optimizer)
            parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(parameters, recipe.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {name: loss.detach() for name, loss in losses.items()}

    def _shared(self, losses: dict[str, Tensor]) -> dict[str, float]:
        """The losses of a step, their mean over the processes, and their sum."""
        values = self.processes.mean(torch.stack([v.float() for v in losses.values()]))
        named = dict(zip(losses, values.tolist(), strict=True))
        return {**named, "loss": float(values.sum())}

    def _finish(self, epoch: int, journal: Journal | None) -> None:
        """Write a checkpoint and score, without changing the random state of the run."""
        self._save(lasting=True)
        self._score(epoch, journal)

    def _catch_up(self, journal: Journal | None) -> None:
        """Score an epoch whose checkpoint was written before the run was interrupted."""
        step, epoch = self.position.step, self.position.epoch
        if epoch and not self.position.samples:
            scored = journal is not None and journal.holds(step, "val/")
            if not self.processes.gather(scored)[0]:
                self._score(epoch - 1, journal)

    def _score(self, epoch: int, journal: Journal | None) -> None:
        if self.validate is None:
            return
        before = checkpoints.random_state(self.processes.device)
        self.objective.eval()
        scores = self.validate()
        checkpoints.restore_random(before, self.processes.device)
        if journal is not None:
            journal.write(self.position.step, epoch, _named(scores, "val"))

    def _save(self, *, lasting: bool) -> None:
        device = self.processes.device
        random = self.processes.gather(checkpoints.random_state(device))
        if self.processes.first:
            content = Checkpoint(
                self.position,
                self.objective.state_dict(),
                self.optimizer.state_dict(),
                self.scaler.state_dict(),
                random,
                self.about,
            )
            checkpoints.save(
                content, self.folder / "checkpoints", keep=self.options.keep, lasting=lasting,
                shard=self.options.shard,
            )  # fmt: skip
        self.processes.wait()

    def _resume(self) -> None:
        # The first process chooses; the others might find another checkpoint.
        chosen, problem = None, None
        if self.processes.first:
            try:
                chosen = checkpoints.newest(self.folder / "checkpoints")
            except CheckpointError as error:  # raised in all processes below
                problem = error
        path, problem = self.processes.gather((chosen and chosen[0], problem))[0]
        if problem is not None:
            raise problem
        if path is None:
            return
        saved = chosen[1] if chosen else checkpoints.load(path)
        if saved.about != self.about:
            different = ", ".join(_differences(saved.about, self.about))
            raise CheckpointError(
                f"{self.folder} holds a run that differs in {different}. Give another folder, or "
                "the settings it was started with (settings.json)."
            )
        self.objective.load_state_dict(saved.model)
        self.optimizer.load_state_dict(saved.optimizer)
        self.scaler.load_state_dict(saved.scaler)
        self.position = saved.position
        if len(saved.random) == self.processes.world:
            checkpoints.restore_random(saved.random[self.processes.rank], self.processes.device)


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """The settings in which two runs differ, with both values."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted({*there, *here})
        parts = (_differences(there.get(k), here.get(k), f"{name}.{k}".strip(".")) for k in keys)
        return [line for part in parts for line in part]
    if there == here:
        return []
    return [f"{name} ({str(there)[:60]} there, {str(here)[:60]} here)"]


def _named(values: dict[str, float], split: str) -> dict[str, float]:
    return {f"{split}/{name}": value for name, value in values.items()}


def _moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device: everything in it that has a method `to`."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(part, device) for part in batch)
    return batch
