"""Which sources may be added through the page.

Whoever can open the page may be a stranger to the machine, or a web site may act in the name of
its user. So the page opens what the command line allows, and nothing else: files in some folders,
addresses of some servers, videos of the generated world up to a size.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from eventful.errors import ConfigError, EventfulError
from eventful.paper.data import world as worlds
from eventful.pipeline.sources import SourceName
from eventful.video.address import IMAGE_SUFFIXES, Source, find_source, without_credentials

VIDEO_SUFFIXES = frozenset(
    {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm"}
)
_SCHEMES = {"http": 80, "https": 443, "rtsp": 554, "rtsps": 322}
_LONGEST = 2000  # characters of a source
_HOPS = 4  # redirects that are followed
_TIMEOUT = 5.0  # seconds to ask a server whether it redirects
_WORLD_FRAMES, _WORLD_PIXELS = 500, 512 * 1024


class Refused(ConfigError):
    """A request that is answered with an error and changes nothing.

    Attributes:
        status: the number of the answer, 400 to 499.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class UrlRule:
    """Addresses of one server, below a path."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> UrlRule:
        """A rule from an address, such as `rtsp://camera.local/` or `https://host:8443/videos/`.

        Raises:
            ConfigError: It is no such address.
        """
        parts = _split(text)
        if parts is None or parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                f"--allow-url {without_credentials(text)}: give scheme, host and a path, such as "
                "rtsp://camera.local/ or https://host/videos/, without a user name."
            )
        return cls(parts.scheme, _host(parts), _port(parts), parts.path or "/")

    def allows(self, parts: SplitResult) -> bool:
        """Whether an address lies below this one; a path that climbs up does not."""
        steps = re.split(r"[/\\]", unquote(unquote(parts.path)))
        below = parts.path == self.path or parts.path.startswith(self.path.rstrip("/") + "/")
        same = (parts.scheme, _host(parts), _port(parts)) == (self.scheme, self.host, self.port)
        return same and ".." not in steps and (below or self.path == "/")


@dataclass(frozen=True)
class Allowed:
    """What the page may open.

    Attributes:
        folders: files and folders of pictures below them.
        cameras: whether `camera:0` may be named.
        upload_bytes: of one file; 0 for no uploads.
    """

    folders: tuple[Path, ...] = ()
    urls: tuple[UrlRule, ...] = ()
    cameras: bool = False
    upload_bytes: int = 64_000_000

    @property
    def kinds(self) -> list[str]:
        """What may be added, in words for the page."""
        kinds = ["world:7"]
        kinds += ["files in the allowed folders"] if self.folders else []
        kinds += ["allowed addresses"] if self.urls else []
        return kinds + (["camera:0"] if self.cameras else [])

    def admit(self, text: object) -> SourceName:
        """The source that a user of the page named.

        Raises:
            Refused: It may not be opened, or it is no source.
        """
        if not isinstance(text, str) or not text.strip():
            raise Refused(422, "Name a source as a text, such as world:7.")
        text = text.strip()
        if len(text) > _LONGEST or any(ord(letter) < 32 for letter in text):
            raise Refused(422, f"A source has at most {_LONGEST} characters, on one line.")
        scheme = text.partition(":")[0].lower()
        if text.startswith(worlds.PREFIX):
            return _world(text)
        if scheme == "camera":
            return self._camera(text)
        if scheme in _SCHEMES:
            return self._address(text)
        if "://" in text:
            raise Refused(422, f"Addresses begin with {', '.join(f'{s}://' for s in _SCHEMES)}.")
        return self._file(text)

    def _camera(self, text: str) -> SourceName:
        if not self.cameras:
            raise Refused(403, "Cameras are not allowed: start the page with --allow-camera.")
        if not text.partition(":")[2].isdecimal():
            raise Refused(422, "A camera is named by its number, such as camera:0.")
        return SourceName(text, "camera", text)

    def _address(self, text: str) -> SourceName:
        shown = without_credentials(text)
        parts = _split(text)
        if parts is None:
            raise Refused(422, f"{shown} is no address.")
        self._check_url(parts, shown)
        address = text
        if parts.scheme in ("http", "https"):
            address = self._followed(text)
        kind = "http" if parts.scheme.startswith("http") else "rtsp"
        found = Source(kind, shown, address, strict=True)  # type: ignore[arg-type]
        return SourceName(shown, "address", address, found)

    def _check_url(self, parts: SplitResult, shown: str) -> None:
        if not any(rule.allows(parts) for rule in self.urls):
            raise Refused(
                403, f"{shown} is not among the allowed addresses: start the page with --allow-url."
            )

    def _followed(self, address: str) -> str:
        """An HTTP address behind its redirects, each of which must be allowed and public."""
        for _ in range(_HOPS):
            target = _redirect(address)
            if target is None:
                return address
            parts, shown = _split(target), without_credentials(target)
            if parts is None or parts.scheme not in ("http", "https"):
                raise Refused(403, f"The address leads to {shown}, which is no HTTP address.")
            if is_private(_host(parts), _port(parts)):
                raise Refused(403, f"The address leads to {shown}, a private address.")
            self._check_url(parts, f"The address leads to another one: {shown}")
            address = target
        raise Refused(403, f"The address leads to others more than {_HOPS} times.")

    def _file(self, text: str) -> SourceName:
        if not self.folders:
            raise Refused(403, "Files are not allowed: start the page with --allow-folder.")
        outside = Refused(403, "This path is outside of the allowed folders.")
        missing: Refused | None = None
        for folder in self.folders:
            root = folder.resolve()
            path = (root / text).resolve()
            if not path.is_relative_to(root):
                continue
            if not path.exists():
                missing = Refused(404, f"{text} is not in the allowed folders.")
                continue
            return _local(path, root, outside)
        raise missing or outside


def _local(path: Path, root: Path, outside: Refused) -> SourceName:
    """A video file or a folder of pictures that lies in a folder."""
    name = str(path.relative_to(root))
    if path.is_file():
        if path.suffix.lower() not in VIDEO_SUFFIXES | IMAGE_SUFFIXES:
            kinds = ", ".join(sorted(VIDEO_SUFFIXES))
            raise Refused(422, f"{name} is no video: {kinds}, or a picture.")
    elif not path.is_dir():
        raise Refused(422, f"{name} is neither a file nor a folder.")
    try:
        found = find_source(path)
    except EventfulError:
        raise Refused(422, f"{name} holds no pictures.") from None
    if any(not image.resolve().is_relative_to(root) for image in found.images):
        raise outside
    return SourceName(name, "file", str(path), replace(found, shown=name))


def _world(text: str) -> SourceName:
    """A video of the generated world; a large one would take all time of the machine."""
    if not worlds.names_seed(text):
        raise Refused(422, "Name one video of the generated world by its seed, such as world:7.")
    if "device=" in text:
        raise Refused(422, "A video of the generated world is rendered on the CPU here.")
    try:
        world = worlds.open_seed(text)
    except (EventfulError, ValueError) as error:
        raise Refused(422, str(error)) from None
    height, width = world.size
    if world.frames > _WORLD_FRAMES or height * width > _WORLD_PIXELS or world.exposures > 3:
        raise Refused(
            422,
            f"A video of the generated world has at most {_WORLD_FRAMES} frames of "
            f"{_WORLD_PIXELS} pixels and 3 exposures here.",
        )
    return SourceName(text, "world", text)


def is_private(
    host: str, port: int, resolve: Callable[..., list[tuple[object, ...]]] | None = None
) -> bool:
    """Whether a host is, or may be, inside a network of one's own; true if it has no address."""
    try:
        found = (resolve or socket.getaddrinfo)(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]  # type: ignore[index]
    mapped = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    return not mapped or any(not address.is_global for address in mapped)


def _redirect(address: str) -> str | None:
    """Where an HTTP server sends one who asks for an address; None if it does not."""
    parts = urlsplit(address)
    shown = without_credentials(address)
    host, port = _host(parts), _port(parts)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            host, port, timeout=_TIMEOUT, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    asked = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", asked, headers={"Range": "bytes=0-0"})
        answer = connection.getresponse()
        target = answer.getheader("Location")
        leads = 300 <= answer.status < 400 and target is not None
        return urljoin(address, target) if leads and target else None
    except (OSError, http.client.HTTPException, ValueError):
        raise Refused(422, f"{shown} does not answer.") from None
    finally:
        connection.close()


def _split(text: str) -> SplitResult | None:
    """The parts of an address of a known scheme; None if it is none."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if good and "\\" not in text else None


def _host(parts: SplitResult) -> str:
    return (parts.hostname or "").rstrip(".").lower()


def _port(parts: SplitResult) -> int:
    return parts.port or _SCHEMES[parts.scheme]
