"""Accounts and waiting results on disk: SQLite with a write-ahead log.

A result and the position of its stream are written in one transaction, so that after any crash
either both are there or none. Nothing in it opens a source: addresses are not kept.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from eventful.cluster.accounts import Account, Missed
from eventful.errors import RunError

VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS streams (name TEXT PRIMARY KEY, account TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS waiting (number INTEGER PRIMARY KEY, row TEXT NOT NULL);
"""
_KEPT = tuple(f.name for f in fields(Account))
Row = dict[str, Any]


class StoreError(RunError, OSError):
    """The state could not be written, as on a full disk. Nothing of the transaction is kept."""


class Store:
    """The state of a run in one file.

    Args:
        path: of the file; its folder must be on a disk of this machine, not on a network.

    Raises:
        RunError: The file is of another version, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            raise RunError(
                f"{path} cannot be used ({error}). Make room on its disk, or bring back a copy of "
                "it, or begin anew with --overwrite."
            ) from None

    def _open(self) -> None:
        self._base = sqlite3.connect(
            self.path, timeout=10, isolation_level=None, check_same_thread=False
        )
        self._base.execute("PRAGMA journal_mode=WAL")
        # A transaction that has ended survives a power failure, too.
        self._base.execute("PRAGMA synchronous=FULL")
        self._base.executescript(_SCHEMA)
        found = self.fact("version")
        if found is None:
            self.write(facts={"version": VERSION})
        elif found != VERSION:
            raise RunError(f"{self.path} is of version {found}, not {VERSION}. Use --overwrite.")

    def fact(self, name: str) -> Any:
        """A single value by name; None if there is none."""
        row = self._base.execute("SELECT value FROM facts WHERE name=?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def accounts(self) -> list[Account]:
        """All streams, in the order they were added."""
        rows = self._base.execute("SELECT account FROM streams ORDER BY rowid")
        return [_account(json.loads(text)) for (text,) in rows]

    def waiting(self) -> Iterator[tuple[int, Row]]:
        """Results that have not reached their destination, in turn."""
        for number, text in self._base.execute("SELECT number, row FROM waiting ORDER BY number"):
            yield number, json.loads(text)

    def write(
        self,
        accounts: Iterable[Account] = (),
        rows: Iterable[tuple[int, Row]] = (),
        *,
        done: int | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Write all of this, or nothing.

        Args:
            rows: new results with their numbers.
            done: results up to this number have reached their destination.

        Raises:
            StoreError: It could not be written.
        """
        try:
            with self._base:
                self._base.execute("BEGIN IMMEDIATE")
                self._base.executemany(
                    "INSERT INTO streams VALUES (?, ?) "
                    "ON CONFLICT (name) DO UPDATE SET account=excluded.account",
                    [(account.name, json.dumps(_kept(account))) for account in accounts],
                )
                self._base.executemany(
                    "INSERT INTO waiting VALUES (?, ?)",
                    [(number, json.dumps(row)) for number, row in rows],
                )
                if done is not None:
                    self._base.execute("DELETE FROM waiting WHERE number <= ?", (done,))
                self._base.executemany(
                    "INSERT OR REPLACE INTO facts VALUES (?, ?)",
                    [(name, json.dumps(value)) for name, value in (facts or {}).items()],
                )
        except sqlite3.OperationalError as error:
            raise StoreError(f"{self.path} cannot be written to: {error}.") from None

    def close(self) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self._base.close()


def _kept(account: Account) -> dict[str, Any]:
    return asdict(account)


def _account(values: dict[str, Any]) -> Account:
    known = {name: value for name, value in values.items() if name in _KEPT}
    if known.get("held") is not None:
        known["held"] = Missed(**known["held"])
    return Account(**known)
