"""Faults put into the code on purpose, and the tests that must find them.

python tests/mutants.py            # all of them, a few minutes
python tests/mutants.py --only 3   # one, by its number

Each fault is put into a copy of the sources; a fault that no test finds makes this fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        file: below src/eventful.
        old, new: text that occurs once, and what takes its place.
        tests: of which at least one must fail, as pytest is given them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "sample() returns zeros above 512 tokens",
        "ops/reference/gates.py",
        "    return tokens[:, torch.arange(SAMPLE, device=tokens.device) * count // SAMPLE]\n",
        "    return torch.zeros_like(tokens[:, :SAMPLE])\n",
        ("tests/test_fallback.py", "tests/test_matrix.py"),
    ),
    Mutant(
        "the width of a threshold ignores the last report",
        "engine/widths.py",
        "guess = share if counts is None else counts.passed * _MARGIN",
        "guess = share",
        ("tests/test_residence.py", "tests/test_matrix.py"),
    ),
    Mutant(
        "what a device need not wait for is not looked at",
        "engine/runner.py",
        "            view = self._check_late(rows, settings=not done.ran_model) or view\n",
        "            pass\n",
        ("tests/test_residence_reports.py", "tests/test_matrix.py"),
    ),
    Mutant(
        "recordings and constants are kept after a change of weights",
        "engine/store.py",
        "            self.constants.clear()\n            self._drop_shapes()\n",
        "",
        ("tests/test_residence_reports.py", "tests/test_positions.py"),
    ),
    Mutant(
        "an unsound output is never reported",
        "engine/device.py",
        "            if slot in state.rows and row[1] and not sound\n",
        "            if False and slot in state.rows and row[1] and not sound\n",
        ("tests/test_residence_reports.py", "tests/test_matrix.py"),
    ),
    Mutant(
        "what a stream that left reported is taken for its successor's",
        "engine/device.py",
        "        for flight in (*self._pending, *self._before):\n",
        "        for flight in ():\n",
        ("tests/test_residence_reports.py", "tests/test_matrix.py"),
    ),
    Mutant(
        "the limit of the fallback is off by 7",
        "cost/times.py",
        "            return wanted > limit * share\n",
        "            return wanted > limit * share + 7\n",
        ("tests/test_costs.py",),
    ),
    Mutant(
        "a stream never comes back from dense steps",
        "cost/fallback.py",
        "        share = RETURN if self._state is _State.DENSE else 1.0\n",
        "        share = 0.0 if self._state is _State.DENSE else 1.0\n",
        ("tests/test_fallback.py",),
    ),
    Mutant(
        "a dense step reports every token as wanted",
        "rules/gate.py",
        "    if this.leading:\n        _take_report(this)\n    levels.learn()\n",
        "    if this.leading:\n"
        "        inputs.report[:, 0] = error.shape[1] if step.flush_all else inputs.report[:, 0]\n"
        "        _take_report(this)\n"
        "    levels.learn()\n",
        ("tests/test_fallback.py",),
    ),
    Mutant(
        "special and due tokens count toward r",
        "ops/reference/gates.py",
        "    allowed = least + torch.minimum(cap, by_error)\n",
        "    allowed = torch.maximum(least, torch.minimum(cap, least + by_error))\n",
        ("tests/test_streams.py", "tests/test_backends.py"),
    ),
    Mutant(
        "positions are resized in every frame",
        "rules/step.py",
        "            self.constants[key] = made\n",
        "            pass\n",
        ("tests/test_positions.py",),
    ),
    Mutant(
        "a damaged snapshot loads",
        "memory/snapshot.py",
        "    if not whole:\n",
        "    if False:\n",
        ("tests/test_snapshots.py", "tests/test_changes.py"),
    ),
    Mutant(
        "writes past the version counter are not looked for on a device",
        "engine/device.py",
        "        if any([row[4] > 0 for flight in last for row in flight.report]):\n",
        "        if False:\n",
        ("tests/test_residence_reports.py",),
    ),
    Mutant(
        "a steady stream's turns stand still on a device",
        "engine/shaped.py",
        "        self.params[1] += 1\n",
        "",
        ("tests/test_residence.py", "tests/test_matrix.py"),
    ),
    Mutant(
        "rows that wait to be recomputed are not the worst",
        "ops/reference/exact.py",
        "    worst = beyond.argsort(dim=-1, descending=True, stable=True)\n",
        "    worst = beyond.argsort(dim=-1, stable=True)\n",
        ("tests/test_backends.py", "tests/test_attention.py"),
    ),
    Mutant(
        "a closed stream keeps its slots",
        "engine/device.py",
        "        self.state.release()\n",
        "",
        ("tests/test_lifetimes.py",),
    ),
    Mutant(
        "kept outputs do not move with the picture",
        "rules/block.py",
        "        carry(step, spec, slot)\n",
        "",
        ("tests/test_motion.py",),
    ),
    Mutant(
        "the picture of the first frame is kept for ever",
        "rules/block.py",
        "        keep_picture(step, spec)\n",
        "        if step.flush_all:\n            keep_picture(step, spec)\n",
        ("tests/test_motion.py",),
    ),
    Mutant(
        "the context of an updated token is not reset",
        "rules/context.py",
        'rows = {"query": q, "lse": attention.placed(lse), "change": torch.zeros_like(q)}\n',
        'rows = {"query": q, "lse": attention.placed(lse)}\n'
        "    if step.flush_all:\n"
        '        rows["change"] = torch.zeros_like(q)\n',
        ("tests/test_context.py",),
    ),
    Mutant(
        "padded slots add to the context",
        "rules/context.py",
        "new, old, attention.keys.count, spec.scale",
        "new, old, None, spec.scale",
        ("tests/test_context.py",),
    ),
    Mutant(
        "a stream with a budget starts over, too",
        "policies/kinds.py",
        "renewal=math.inf if self.renewal is None or budget else self.renewal",
        "renewal=math.inf if self.renewal is None else self.renewal",
        ("tests/test_default.py",),
    ),
    Mutant(
        "a scene cut is judged by scores with context",
        "rules/gate.py",
        "scene_error=plain if scenes and plain is not error else None",
        "scene_error=None",
        ("tests/test_default.py", "tests/test_context.py"),
    ),
    Mutant(
        "a pool compares errors without their unit",
        "ops/reference/pool.py",
        "error / contrast.clamp_min(LEAST)[:, None]",
        "error",
        ("tests/test_shared.py",),
    ),
    Mutant(
        "the busiest stream of a pool decides on dense steps",
        "rules/gate.py",
        "        counts = _pooled_counts(params, counts)\n",
        "        pass\n",
        ("tests/test_shared.py",),
    ),
    Mutant(
        "more rows are packed than there is room for",
        "rules/gate.py",
        "        picked = ops.fit_rows(picked, inputs.rows)\n",
        "        pass\n",
        ("tests/test_packed.py",),
    ),
    Mutant(
        "packed rows attend to the keys of the first stream",
        "rules/attention.py",
        "args = (heads, self.heads(k[own]), self.heads(v[own]), scale)",
        "args = (heads, self.heads(k[:1]), self.heads(v[:1]), scale)",
        ("tests/test_packed.py",),
    ),
    Mutant(
        "comparisons do not correct the predicted error",
        "budget/error.py",
        "self._gain += weight * (error / (estimate + self._base) / grown - self._gain)",
        "pass",
        ("tests/test_budget.py",),
    ),
    Mutant(
        "levels rise without a comparison",
        "budget/error.py",
        "self._level = min(self._level * faster, LEVELS[1], UNSEEN * self._seen)",
        "self._level = min(self._level * faster, 100.0)",
        ("tests/test_budget.py",),
    ),
    Mutant(
        "a single slow step is believed",
        "budget/time.py",
        "        if self._odd:\n            return\n",
        "",
        ("tests/test_budget.py",),
    ),
    Mutant(
        "forced tokens are left out of what a step takes",
        "budget/time.py",
        "count = self._facts.fit(round(self._share * tokens)) - self._facts.forced",
        "count = self._facts.fit(round(self._share * tokens))",
        ("tests/test_budget.py",),
    ),
    Mutant(
        "after a comparison the stale output is returned",
        "engine/controlled.py",
        "        return again\n\n    def _outputs",
        "        return done\n\n    def _outputs",
        ("tests/test_budget.py",),
    ),
    Mutant(
        "what a step told is heard twice after one that failed",
        "engine/host.py",
        "        record, self._last = self._last, None\n",
        "        record = self._last\n",
        ("tests/test_budget.py",),
    ),
)


def apply(mutant: Mutant, root: Path) -> None:
    """Put the fault into the sources below `root`."""
    path = root / "src" / "eventful" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text occurs {text.count(mutant.old)} times.")
    path.write_text(text.replace(mutant.old, mutant.new))


def survives(mutant: Mutant) -> bool:
    """Whether no test finds the fault."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in ("src", "tests", "benchmarks", "docs"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, root / name)
        apply(mutant, root)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        paths = os.pathsep.join([str(root / "src"), str(root / "tests")])
        done = subprocess.run(
            [*command, *mutant.tests],
            cwd=root,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            raise SystemExit(f"{mutant.name}: pytest failed.\n{done.stdout[-2000:]}")
        found = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        print(f"  {found[0][:150] if found else 'no test failed'}", flush=True)
        return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, help="number of one fault")
    only = parser.parse_args().only
    left = []
    for number, mutant in enumerate(MUTANTS, start=1):
        if only in (None, number):
            print(f"{number}. {mutant.name}", flush=True)
            if survives(mutant):
                left.append(mutant.name)
    if left:
        raise SystemExit(f"No test finds: {'; '.join(left)}.")


if __name__ == "__main__":
    main()
