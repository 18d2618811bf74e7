"""Which addresses the processes of this machine listen on, as Linux tells."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"  # state of a socket in /proc/net/tcp


@dataclass(frozen=True)
class Listening:
    """A socket that waits for connections; pid 0 if its process is not known."""

    host: str
    port: int
    pid: int


def listening() -> list[Listening]:
    """All sockets of TCP that wait for connections; none where there is no /proc."""
    owners = dict(_owners())
    found = []
    for file in ("tcp", "tcp6"):
        path = Path("/proc/net") / file
        for line in path.read_text().splitlines()[1:] if path.is_file() else ():
            words = line.split()
            if words[3] == _LISTENS:
                host, _, port = words[1].partition(":")
                found.append(Listening(_address(host), int(port, 16), owners.get(words[9], 0)))
    return found


def children(pid: int) -> set[int]:
    """All processes below one."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents.setdefault(int(words[1]), []).append(int(path.parent.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = parents.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def _owners() -> Iterator[tuple[str, int]]:
    """Number of each socket, and the process that holds it."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            links = [os.readlink(entry) for entry in os.scandir(folder)]
        except OSError:
            continue
        for link in links:
            if match := re.fullmatch(r"socket:\[(\d+)\]", link):
                yield match[1], int(folder.parent.name)


def _address(text: str) -> str:
    """An address as /proc writes it: words of 32 bits in the order of the machine."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
