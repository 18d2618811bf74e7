"""Writing files whole or not at all, and digests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from eventful import files


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_only_when_the_block_ends_well(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    writing = files.replacing(path, durable=durable)
    writing.__enter__().write_text("half")
    assert not writing.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert path.read_text() == "old"
    with files.replacing(path, durable=durable) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folders_are_made_for_bytes_and_json(tmp_path: Path) -> None:
    files.write_bytes(tmp_path / "a" / "b.bin", b"12")
    files.write_json(tmp_path / "c" / "d.json", {"e": 1}, indent=2)
    assert (tmp_path / "a" / "b.bin").read_bytes() == b"12"
    assert (tmp_path / "c" / "d.json").read_text() == '{\n  "e": 1\n}\n'
    with pytest.raises(FileNotFoundError), files.replacing(tmp_path / "f" / "g") as partial:
        partial.write_text("")


def test_digests_are_sha256_of_all_parts(tmp_path: Path) -> None:
    expected = hashlib.sha256("aµb".encode()).hexdigest()
    assert files.digest(["a", "µ".encode(), memoryview(b"b")]) == expected
    (tmp_path / "x").write_text("aµb", encoding="utf-8")
    assert files.file_digest(tmp_path / "x") == expected
