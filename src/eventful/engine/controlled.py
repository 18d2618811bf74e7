"""Streams that hold a budget, and that are compared with the dense model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.budget.audit import Audit, comparable, compare
from eventful.budget.base import Budget, BudgetReport
from eventful.cost.times import start_clock
from eventful.engine.call import Call
from eventful.engine.control import checked_budget, facts_of
from eventful.engine.executor import StepResult
from eventful.engine.runner import Runner
from eventful.errors import ConfigError, UnsupportedError
from eventful.policies import Always, Policy


class ControlledRunner(Runner):
    """A runner whose policy may follow a budget; comparisons show how good it is."""

    def _run_controlled(
        self, rows: Sequence[int], policies: Sequence[Policy | None], call: Call
    ) -> StepResult:
        """As `_run`, with the policy that the budget wants, and comparisons where they are due."""
        control = self._control
        if not control.active:
            return self._run(rows, policies, call)
        control.start()
        if control.facts is None and control.budget is not None and self._last is not None:
            each = self.nbytes // max(len(self._state), 1)
            control.facts = facts_of(
                self._last(), self.config, each,
                shared=self._partial, slots=not self._state.reversible,
            )  # fmt: skip

        if control.budget is not None:
            policies = [Always() if policy is None else policy for policy in policies]
        if self._fallbacks.pause(control.budget is not None and not control.budget.fallback):
            self._planned = None

        def chosen() -> Sequence[Policy | None]:
            own = control.choose(self._executor.told(), len(self._state))
            if control.wanted.dense:
                self._executor.flush(rows)
            return policies if own is None else [own] * len(policies)

        done = self._run(rows, chosen, call)
        control.stepped(done, later=not self._state.reversible)
        if control.wanted.audit:
            done = self._recompute(rows, policies, call, done)
        due = control.every is not None and self._steps % control.every == 1 % control.every
        if due and not done.left_out:
            self._compare(call, done)
        return done

    def _recompute(
        self, rows: Sequence[int], policies: Sequence[Policy | None], call: Call, done: StepResult
    ) -> StepResult:
        """A dense step on the frame that was just stepped; shows the true error of the step."""
        control = self._control
        self._executor.settle()
        told = self._executor.told()
        if told is None or told.flushed:
            return done
        held = self._outputs()
        self._executor.flush(rows)
        step = self._steps
        again = self._run(rows, policies, call)
        self._steps = step  # a second pass, no further step
        self._tally.again(len(rows))
        pairs = comparable(done.output, again.output, len(rows))
        pairs = pairs or list(zip(held, self._outputs(), strict=False))
        if not pairs:
            return again
        read = _once_read(compare(pairs))
        control.compared(told, lambda: read()[0])
        clock = again.clock or (lambda: 0.0)
        control.log.add(lambda: Audit.of(step - 1, read(), clock(), recomputed=True))
        return again

    def _outputs(self) -> list[Tensor]:
        """(B, N, D) what is remembered of each trunk's output, without its scale."""
        names = [f"{blocks[-1]}/output" for blocks in self._session.blocks.values()]
        held = [self._state.copy(name).float() for name in names if name in self._state]
        return [F.layer_norm(tensor, tensor.shape[-1:]) for tensor in held]

    def _compare(self, call: Call, done: StepResult) -> None:
        """Compare the output with the model's own; what the stream does stays the same."""
        clock = start_clock(call.frame.device)
        with torch.no_grad():
            dense = call.run()
        pairs = comparable(done.output, dense, len(call.frame))
        if not pairs:
            raise UnsupportedError(
                "An audit compares tensors, and this call returns none of one shape for stream "
                "and dense model. Audit a call that returns features, e.g. "
                "stream.call('forward_features', frame)."
            )
        read, took, step = _once_read(compare(pairs)), clock(), self._steps
        self._control.log.add(lambda: Audit.of(step - 1, read(), took()))

    def audit(self, every: int | None) -> None:
        """Compare each so many steps with the dense model; None stops it.

        It costs a dense pass each time, which `summary()` tells. Outputs stay as they are.
        """
        whole = isinstance(every, int) and not isinstance(every, bool) and every > 0
        if every is not None and not whole:
            raise ConfigError(
                f"audit(every=...) counts steps from 1 on, or is None; got {every!r}."
            )
        self._control.every = every

    @property
    def audits(self) -> tuple[Audit, ...]:
        """The comparisons with the dense model, oldest first."""
        return self._control.log.audits

    @property
    def budget(self) -> Budget | None:
        """What is held; assign another, or None, at any time: it takes effect at the next frame."""
        return self._control.asked

    @budget.setter
    def budget(self, budget: Budget | None) -> None:
        self._control.asked = checked_budget(budget, self.config, batch=self._partial)

    @property
    def budget_report(self) -> BudgetReport | None:
        """How the budget is doing; None without one, or before the first frames."""
        return self._control.report()


def _once_read(values: Tensor) -> Callable[[], list[float]]:
    """Numbers of a device, read when they are first asked for."""
    made: list[list[float]] = []

    def get() -> list[float]:
        if not made:
            made.append(values.tolist())
        return made[0]

    return get
