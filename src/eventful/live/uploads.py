"""Videos that a viewer uploads: limited in kind, size and number, and removed with their source."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from eventful.errors import EventfulError
from eventful.live.admission import VIDEO_SUFFIXES, Refused
from eventful.pipeline.sources import SourceName, open_source
from eventful.video.address import find_source


class Uploads:
    """A folder of uploaded videos, which is removed at the end.

    Args:
        most_bytes: of one video; 0 for no uploads.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.folder = Path(tempfile.mkdtemp(prefix="eventful-live-"))
        self.busy = False

    def check(self, name: str, length: str | None) -> None:
        """Raise for what can be refused before anything is read."""
        if not self.most_bytes:
            raise Refused(403, "Uploads are not allowed.")
        if PurePosixPath(name).suffix.lower() not in VIDEO_SUFFIXES:
            raise Refused(415, f"Upload a video: {', '.join(sorted(VIDEO_SUFFIXES))}.")
        if self.busy:
            raise Refused(409, "Another upload is under way. Wait for its end.")
        if length is not None and (not length.isdecimal() or int(length) > self.most_bytes):
            raise self._too_large()

    async def receive(self, name: str, chunks: AsyncIterator[bytes]) -> Path:
        """Write a video to the folder."""
        suffix = PurePosixPath(name).suffix.lower()
        path = self.folder / f"{secrets.token_hex(8)}{suffix}"
        total = 0
        self.busy = True
        try:
            with path.open("xb") as file:
                async for chunk in chunks:
                    total += len(chunk)
                    if total > self.most_bytes:
                        raise self._too_large()
                    file.write(chunk)
            if not total:
                raise Refused(422, "The upload is empty.")
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            self.busy = False
        return path

    def opened(self, path: Path, name: str) -> SourceName:
        """An uploaded video as a source; it is tried first, and removed if it does not decode."""
        shown = "".join(letter for letter in PurePosixPath(name).name if letter.isprintable())
        shown = shown[:80] or "upload"
        try:
            found = replace(find_source(path), shown=shown)  # no message names the folder
            source = SourceName(shown, "upload", str(path), found)
            footage = open_source(source)
            try:
                next(iter(footage.frames()))
            finally:
                footage.close()
        except (EventfulError, StopIteration):
            self.remove(str(path))
            raise Refused(422, f"{shown} does not decode as a video.") from None
        return source

    def remove(self, address: str) -> None:
        """Remove the file of a source, if it is an upload."""
        path = Path(address)
        if path.parent == self.folder:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _too_large(self) -> Refused:
        return Refused(413, f"An upload has at most {self.most_bytes / 1e6:g} MB.")
