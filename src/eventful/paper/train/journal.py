"""Scalars of a run as rows of a CSV file, and in TensorBoard if it is installed."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

from eventful.errors import RunError

COLUMNS = ("step", "epoch", "name", "value")


class Journal:
    """Scalars of one run, `scalars.csv` and `tensorboard/` in its folder.

    Args:
        step: the step the run resumes from; later rows of the file are dropped.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{folder} cannot be written to ({error}). Give another.") from None
        self.path = folder / "scalars.csv"
        kept = [row for row in read(self.path) if int(row["step"]) <= step] if step else []
        self._held = {(int(row["step"]), row["name"]) for row in kept}
        self._file = self.path.open("w", newline="")
        self._rows = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        self._rows.writeheader()
        self._rows.writerows(kept)
        self._file.flush()
        self._board = _board(folder / "tensorboard", step)

    def write(self, step: int, epoch: int, values: dict[str, float]) -> None:
        """Log scalars of a step."""
        for name, value in values.items():
            row = {"step": step, "epoch": epoch, "name": name, "value": repr(float(value))}
            self._rows.writerow(row)
            if self._board is not None:
                self._board.add_scalar(name, value, step)
        self._file.flush()

    def holds(self, step: int, prefix: str) -> bool:
        """Whether a row of this step has a name that begins so."""
        return any(at == step and name.startswith(prefix) for at, name in self._held)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a journal; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _board(folder: Path, step: int) -> Any:
    """TensorBoard's writer; None if it is not installed, since it is optional."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)
