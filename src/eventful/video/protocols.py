"""What FFmpeg may open: protocols and formats, limited to what was asked for.

A video comes from anywhere, and some formats name other files or addresses. A file is read through
the protocol `file` alone and must not be such a list. An address is read through the protocols of
its own scheme. Every `av.open` that reads takes its options from here; a test looks for others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLAYLIST = (
    "is a playlist, which names other files or addresses. Read those themselves, or list them in a "
    ".streams file."
)

_PROTOCOLS = {
    "file": "file",
    "camera": "file",
    "http": "http,https,tcp,tls,crypto",
    "rtsp": "rtsp,rtsps,rtp,udp,tcp,tls",
}
# Formats that open other files, or run scripts.
_LISTS = frozenset({"hls", "dash", "webm_dash_manifest", "concat", "sdp", "imf"})
_OTHERS = frozenset(
    {"avisynth", "ffmetadata", "image2", "lavfi", "mlv", "tee", "vapoursynth", "vobsub"}
)
_REMOTE_LISTS = frozenset({"hls", "dash"})  # their parts are read through http and https alone

_STARTS = (b"#EXTM3U", b"ffconcat", b"<?xml", b"<MPD", b"v=0")
_WORDS = (b"<MPD", b"<CompositionPlaylist", b"c=IN IP")  # FFmpeg looks for these anywhere
_PROBED = 2048  # bytes of a file in which FFmpeg looks first


def open_options(av: Any, kind: str, *, strict: bool = False) -> dict[str, str]:
    """Options of `av.open` for one kind of source.

    Args:
        av: the module, which knows the formats of its FFmpeg.
        kind: `file`, `camera`, `http` or `rtsp`.
        strict: an address may name no other one, by redirects or in a playlist. RTSP is read
            through a relay on loopback then.
    """
    options = {"protocol_whitelist": _PROTOCOLS[kind]}
    if kind == "rtsp":
        options |= {"rtsp_transport": "tcp", "format_whitelist": "rtsp"}
    elif kind != "camera":  # a camera has one format, which is named when it is opened
        lists = kind == "http" and not strict
        refused = _OTHERS | (_LISTS - _REMOTE_LISTS if lists else _LISTS)
        options["format_whitelist"] = ",".join(sorted(set(av.formats_available) - refused))
    if kind == "http" and strict:
        options["max_redirects"] = "0"
    if kind == "rtsp" and strict:
        options["protocol_whitelist"] = "tcp"
    return options


def file_address(path: str | Path) -> str:
    """A path for FFmpeg, which would take a part of some names for a protocol."""
    return f"file:{path}"


def is_playlist(path: str | Path) -> bool:
    """Whether a file names other files or addresses, by its first bytes."""
    with Path(path).open("rb") as file:
        start = file.read(_PROBED).removeprefix(b"\xef\xbb\xbf").lstrip()
    text = b"\0" not in start
    return start.startswith(_STARTS) or (text and any(word in start for word in _WORDS))
