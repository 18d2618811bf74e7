"""What a user may name as the source of a video, and how it is shown without credentials."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from eventful.errors import ConfigError, DataError, MalformedDataError, MissingFileError

Kind = Literal["file", "images", "camera", "http", "rtsp"]

IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
LIST_SUFFIX = ".streams"
_SCHEMES: dict[str, Kind] = {"http": "http", "https": "http", "rtsp": "rtsp", "rtsps": "rtsp"}
# One letter before a colon is a drive of Windows.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):")
_NAMED = re.compile(r"([\w.\- ]*[\w.\-])\s*=\s*(\S.*)")
_ACCEPTED = (
    "a video file, a folder of images, a pattern such as 'frames/*.jpg', 'camera:0', an address "
    "that starts with rtsp://, rtsps://, http:// or https://, or a .streams file"
)


@dataclass(frozen=True)
class Source:
    """One source of frames, checked as far as possible without opening it.

    Attributes:
        shown: what messages and attributes say: the address without credentials.
        address: what is opened; it may hold credentials.
        images: of a folder or pattern, the files in order.
        strict: an address must itself be the video: redirects and playlists are refused.
    """

    kind: Kind
    shown: str
    address: str = field(repr=False)
    images: tuple[Path, ...] = ()
    strict: bool = False

    @property
    def remote(self) -> bool:
        """Whether it is read through the network."""
        return self.kind in ("http", "rtsp")


def find_source(text: str | Path) -> Source:
    """The source that a user named.

    Raises:
        ConfigError: The scheme of the address is not supported, or the text names no source.
        MissingFileError: There is no such file, or a folder or pattern without images.
    """
    if not isinstance(text, str | Path):
        raise ConfigError(f"A source is a str or a Path, not {type(text).__name__}: {_ACCEPTED}.")
    if isinstance(text, Path) or not _SCHEME.match(text) or Path(text).exists():
        return _local(Path(text))
    scheme = text.partition(":")[0].lower()
    if scheme == "camera":
        return _camera(text.partition(":")[2])
    if scheme == "file":
        return _local(Path(unquote(urlsplit(text).path)))
    if scheme not in _SCHEMES:
        # Without slashes, the text ahead of the colon may be a user name.
        named = f"the scheme {scheme!r}" if "://" in text or "@" not in text else "this"
        raise ConfigError(
            f"{without_credentials(text)}: {named} is not supported. A source is {_ACCEPTED}."
        )
    if not urlsplit(text).netloc:
        raise ConfigError(f"{without_credentials(text)} names no host. Write {scheme}://host/path.")
    return Source(_SCHEMES[scheme], without_credentials(text), text)


def without_credentials(address: str) -> str:
    """An address as it may be shown: no user, no password, no values of a query."""
    scheme, mark, rest = address.partition("://")
    if not mark and "@" in address:  # mistyped
        return without_credentials(f"rtsp://{address.rpartition('@')[2]}").removeprefix("rtsp://")
    if not mark:
        return address
    host, slash, path = rest.partition("/")
    if "@" in host:
        host = host.rpartition("@")[2]
    elif "@" in rest and (":" in host or not host):  # a password with a slash in it, or no host
        host, slash, path = rest.rpartition("@")[2].partition("/")
    host, cut, _ = re.sub(r"[?#]", "\0", host).partition("\0")
    path, asked, _ = re.sub(r"[?#]", "\0", path).partition("\0")
    hidden = "?..." if cut or asked else ""
    # Some cameras want user=...&password=... in the path.
    return f"{scheme}://{host}{slash}{re.sub(r'=[^&;/]*', '=...', path)}{hidden}"


def read_list(path: Path) -> dict[str, Source]:
    """The sources of a .streams file, by name.

    One source in a line, or `name = source`. What follows a # at the start of a line or after a
    space is a comment. Paths are relative to the folder of the file.

    Raises:
        MissingFileError: There is no such file, or a source in it is not there.
        MalformedDataError: A line cannot be used, or there are no sources.
    """
    if not path.is_file():
        raise MissingFileError(f"{path} is not there. Check the path.")
    sources: dict[str, Source] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        text = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip()
        if not text:
            continue
        named = _NAMED.fullmatch(text)
        address = named.group(2).strip() if named else text
        problem = ""
        try:
            source = _listed(address, path.parent)
        except (ConfigError, DataError) as error:
            problem = str(error)
        if problem:
            raise MalformedDataError(f"{path}, line {number}: {problem}")
        name = named.group(1) if named else source.shown
        if name in sources:
            raise MalformedDataError(
                f"{path}, line {number}: a second source is named {name!r}. Write another name in "
                "front of it: name = source."
            )
        sources[name] = source
    if not sources:
        raise MalformedDataError(f"{path} names no source. Write one source in each line.")
    return sources


def _listed(address: str, folder: Path) -> Source:
    """A source of a .streams file, whose paths are relative to its folder."""
    if address.endswith(LIST_SUFFIX):
        raise ConfigError("a .streams file cannot name another one.")
    local = not _SCHEME.match(address) and not Path(address).is_absolute()
    return find_source(folder / address if local else address)


def _camera(name: str) -> Source:
    if not name:
        raise ConfigError(
            "camera: needs a number or a device, e.g. camera:0 or camera:/dev/video0."
        )
    return Source("camera", f"camera:{name}", name)


def _local(path: Path) -> Source:
    """A file, a folder of images or a pattern."""
    if path.is_dir():
        found = _images(path.iterdir())
        if not found:
            raise MissingFileError(
                f"{path} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}). Name a folder of "
                "images, or a video file."
            )
        return Source("images", str(path), str(path), found)
    if path.is_file():
        if path.suffix.lower() in IMAGE_SUFFIXES:
            return Source("images", str(path), str(path), (path,))
        return Source("file", str(path), str(path))
    if path.is_char_device():
        return _camera(str(path))
    if path.exists():
        raise ConfigError(f"{path} is neither a file nor a folder. A source is {_ACCEPTED}.")
    if glob.has_magic(str(path)):
        return _pattern(str(path))
    raise MissingFileError(f"{_named(path)} is not there. Check the path; a source is {_ACCEPTED}.")


def _named(path: Path) -> str:
    """A path for messages; of what looks like a mistyped address, what may be shown of it."""
    ahead, mark, rest = str(path).rpartition("@")
    return f"...@{without_credentials(f'@{rest}')}" if mark and ":" in ahead else str(path)


def _pattern(pattern: str) -> Source:
    """The files that a glob pattern matches: images, or one video."""
    files = [path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()]
    if not files:
        raise MissingFileError(f"No file matches {_named(Path(pattern))}. Check the pattern.")
    found = _images(files)
    if len(found) == len(files):
        return Source("images", pattern, pattern, found)
    if len(files) == 1:
        return _local(files[0])
    raise ConfigError(
        f"{pattern} matches {len(files)} files that are not all images. Read videos one by one, or "
        "write their paths into a .streams file to read them side by side."
    )


def _images(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The image files among some, in natural order: 2.jpg is before 10.jpg."""
    found = [p for p in paths if p.suffix.lower() in IMAGE_SUFFIXES and not p.name.startswith(".")]
    return tuple(sorted(found, key=_natural))


def _natural(path: Path) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]
