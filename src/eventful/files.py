"""Files that are written whole or not at all, and digests of content."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # ending of a file that is still being written


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give a path to write to; it replaces `path` when the block ends, unless an error does so.

    A process that is killed leaves a file ending in `.partial` and the old content of `path`.

    Args:
        durable: wait until the content is on the disk, so that it survives a power failure.
    """
    unique = f"{os.getpid()}-{threading.get_ident()}"
    partial = path.with_name(f"{path.name}.{unique}{PARTIAL}")
    try:
        yield partial
        if durable:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file whole or not at all; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=durable) as partial:
        partial.write_bytes(content)


def write_json(path: Path, value: Any, *, indent: int | None = 1, durable: bool = False) -> None:
    """Write a value as JSON, as `write_bytes` does."""
    write_bytes(path, (json.dumps(value, indent=indent) + "\n").encode(), durable=durable)


def digest(parts: Iterable[str | bytes | memoryview]) -> str:
    """SHA-256 of all parts, one after the other, in hexadecimal."""
    made = hashlib.sha256()
    for part in parts:
        made.update(part.encode() if isinstance(part, str) else part)
    return made.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
