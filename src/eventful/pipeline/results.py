"""Results of a run as files that can be added to: JSON lines, Parquet, or npz."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from eventful import files
from eventful.errors import ConfigError, RunError
from eventful.pipeline.predictions import Kind
from eventful.pipeline.settings import Format
from eventful.surgery.libraries import load

LINES = "results.jsonl"
PARTS = {"parquet": "results", "npz": "arrays"}  # folders
_ENDINGS = {"parquet": ".parquet", "npz": ".npz"}
_ROWS = 1024  # frames of a part of Parquet; what is not in a part yet is lost by a power cut
_BYTES = 64 << 20  # of a part of npz
Row = dict[str, Any]


class ResultWriter(ABC):
    """Adds the results of one frame after the other."""

    @abstractmethod
    def write(self, row: Row, arrays: dict[str, Tensor]) -> None:
        """Add one frame.

        Args:
            row: its `source`, `frame` and `seconds`, and the prediction.
            arrays: what is too large for text.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish the files."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file or folder of the results."""


def check_format(form: Format, kind: Kind | None) -> None:
    """Raise where results cannot be written in a format.

    Args:
        kind: of the predictions; None where it is not known yet.

    Raises:
        ConfigError: The format does not fit the predictions.
        MissingDependencyError: pyarrow is not installed.
    """
    if form == "parquet":
        load("pyarrow.parquet")
    if form == "npz" and kind not in (None, "features", "saliency"):
        raise ConfigError(
            f"--format npz is for features and saliency maps; this model gives {kind}. Use jsonl "
            "or parquet."
        )


def open_results(folder: Path, form: Format) -> ResultWriter:
    """A writer that adds to what is in a folder."""
    if form == "parquet":
        return ParquetWriter(folder / PARTS[form])
    return ArrayWriter(folder / PARTS[form]) if form == "npz" else LineWriter(folder / LINES)


def last_frames(folder: Path, form: Format, behind: int = 0) -> dict[str, int]:
    """The last frame of each source in the results of a folder; cuts off half a line.

    Args:
        behind: look only at what was written after this `end_of`.

    Raises:
        RunError: A file cannot be read.
    """
    last: dict[str, int] = {}
    for source, frame in _places(folder, form, behind):
        last[source] = max(frame, last.get(source, -1))
    return last


def end_of(folder: Path, form: Format) -> int:
    """How far the results of a folder go: bytes of the lines, or the number of the last part."""
    if form == "jsonl":
        lines = folder / LINES
        return lines.stat().st_size if lines.is_file() else 0
    parts = (folder / PARTS[form]).glob(f"part-*{_ENDINGS[form]}")
    return max(map(_part_number, parts), default=0)


def _places(folder: Path, form: Format, behind: int) -> Iterator[tuple[str, int]]:
    """Source and number of every frame."""
    if form == "jsonl":
        yield from _lines(folder / LINES, behind)
        return
    for path in sorted((folder / PARTS[form]).glob(f"part-*{_ENDINGS[form]}")):
        if _part_number(path) <= behind:
            continue
        try:
            if path.suffix == ".parquet":
                table = load("pyarrow.parquet").read_table(path, columns=["source", "frame"])
                columns = table.to_pydict()
                yield from zip(columns["source"], columns["frame"], strict=True)
            else:
                with np.load(path) as part:
                    yield from ((str(part["source"]), int(frame)) for frame in part["frame"])
        except (OSError, ValueError, KeyError) as error:
            raise RunError(
                f"{path} cannot be read ({error}). Bring it back, or --overwrite."
            ) from None


def _lines(path: Path, behind: int) -> Iterator[tuple[str, int]]:
    if not path.is_file():
        return
    whole = behind
    with path.open("rb") as file:
        file.seek(behind)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                yield str(row["source"]), int(row["frame"])
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(
                    f"{path}, line {number} is not a result ({error!r}). Delete it, or --overwrite."
                ) from None
            whole += len(line)
    with path.open("rb+") as file:
        file.truncate(whole)


class LineWriter(ResultWriter):
    """One JSON object a line; every line is on its way to the disk before the next frame."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    @property
    def path(self) -> Path:
        """See `ResultWriter`."""
        return self._path

    def write(self, row: Row, arrays: dict[str, Tensor]) -> None:
        """See `ResultWriter`."""
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `ResultWriter`."""
        self._file.close()


class ParquetWriter(ResultWriter):
    """A folder of Parquet files with one row per frame, which readers take as one table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[Row] = []

    @property
    def path(self) -> Path:
        """See `ResultWriter`."""
        return self._folder

    def write(self, row: Row, arrays: dict[str, Tensor]) -> None:
        """See `ResultWriter`."""
        self._rows.append(row)
        if len(self._rows) >= _ROWS:
            self.close()

    def close(self) -> None:
        """See `ResultWriter`: what is left becomes a file."""
        if not self._rows:
            return
        arrow, parquet = load("pyarrow"), load("pyarrow.parquet")
        self._folder.mkdir(parents=True, exist_ok=True)
        table = arrow.Table.from_pylist(self._rows, schema=_schema(arrow, self._rows))
        with files.replacing(_next_part(self._folder, ".parquet")) as partial:
            parquet.write_table(table, partial, compression="zstd")
        self._rows = []


def _schema(arrow: Any, rows: Sequence[Row]) -> Any:
    """Columns that rows have; types are given, since a frame may have no detection."""
    row = {name: value for row in reversed(rows) for name, value in row.items()}
    label = [("label", arrow.string()), ("class", arrow.int32()), ("score", arrow.float32())]
    box = [("box", arrow.list_(arrow.float32(), 4))]
    place = arrow.list_(arrow.int32(), 2)
    numbers = arrow.float32()
    kinds = {
        "detections": arrow.list_(arrow.struct([*box, *label, ("track", arrow.int32())])),
        "labels": arrow.list_(arrow.struct(label)),
        "saliency": arrow.struct([("mean", numbers), ("share", numbers), ("peak", place)]),
        "features": arrow.struct(
            [("shape", arrow.list_(arrow.int32())), ("mean", arrow.list_(numbers))]
        ),
    }
    columns = [("source", arrow.string()), ("frame", arrow.int64()), ("seconds", arrow.float64())]
    columns += [(name, kinds[name]) for name in row if name in kinds]
    if "dense" in row:
        inner = next(iter(row["dense"]))
        columns.append(("dense", arrow.struct([(inner, kinds[inner])])))
    ends = [("first", arrow.int64()), ("last", arrow.int64()), ("reason", arrow.string())]
    leased = {"epoch": arrow.int64(), "missed": arrow.list_(arrow.struct(ends))}
    columns += [(name, kind) for name, kind in leased.items() if name in row]
    return arrow.schema(columns)


class ArrayWriter(ResultWriter):
    """A folder of npz files, each with some frames of one source: `frame`, `seconds`, an array."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[str, list[tuple[Row, dict[str, Tensor]]]] = {}  # by source
        self._held: dict[str, int] = {}

    @property
    def path(self) -> Path:
        """See `ResultWriter`."""
        return self._folder

    def write(self, row: Row, arrays: dict[str, Tensor]) -> None:
        """See `ResultWriter`."""
        if not arrays:
            raise ConfigError("--format npz is for features and saliency maps. Use jsonl.")
        source = row["source"]
        rows = self._rows.setdefault(source, [])
        if rows and not _alike(rows[0], (row, arrays)):
            self._finish(source)
            rows = self._rows.setdefault(source, [])
        rows.append((row, {name: value.clone() for name, value in arrays.items()}))
        size = sum(value.nbytes for value in arrays.values())
        self._held[source] = self._held.get(source, 0) + size
        if sum(self._held.values()) >= _BYTES:
            self._finish(max(self._held, key=lambda name: self._held[name]))

    def close(self) -> None:
        """See `ResultWriter`: what is left becomes files."""
        for source in list(self._rows):
            self._finish(source)

    def _finish(self, source: str) -> None:
        """Write what is held of a source."""
        held = self._rows.pop(source)
        self._held.pop(source, None)
        if not held:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = [row for row, _ in held]
        seconds = [np.nan if row["seconds"] is None else row["seconds"] for row in rows]
        stacked: dict[str, Any] = {
            name: np.stack([arrays[name].numpy() for _, arrays in held]) for name in held[0][1]
        }
        with (
            files.replacing(_next_part(self._folder, ".npz")) as partial,
            partial.open("wb") as file,
        ):
            np.savez(
                file,
                source=np.array(rows[0]["source"]),
                frame=np.array([row["frame"] for row in rows]),
                seconds=np.array(seconds),
                **stacked,
            )


def _next_part(folder: Path, ending: str) -> Path:
    """A file for the next part: behind the last one, even if some before it are gone."""
    last = max(map(_part_number, folder.glob(f"part-*{ending}")), default=0)
    return folder / f"part-{last + 1:05d}{ending}"


def _part_number(path: Path) -> int:
    return int(path.name.partition("-")[2].partition(".")[0])


def _alike(one: tuple[Row, dict[str, Tensor]], other: tuple[Row, dict[str, Tensor]]) -> bool:
    """Whether two frames can be in one file."""
    shapes = [{name: value.shape for name, value in arrays.items()} for _, arrays in (one, other)]
    return bool(one[0]["source"] == other[0]["source"] and shapes[0] == shapes[1])
