"""A relay between FFmpeg and one RTSP server, which ends the connection at a redirect.

FFmpeg follows every redirect of an RTSP server, to any address, and has no option against it. Where
that is not wanted, FFmpeg gets the address of a relay on loopback. The relay is connected to the
server and reads the server's answers ahead of FFmpeg. It passes on only what it understands in the
same way as FFmpeg: where the two differed, a server could hide a redirect.
"""

from __future__ import annotations

import re
import selectors
import socket
import ssl
import threading
from contextlib import suppress
from urllib.parse import urlsplit

from eventful.errors import SourceError
from eventful.video.address import Source

_PORTS = {"rtsp": 554, "rtsps": 322}
_LONGEST_HEAD, _LONGEST_LINE, _LONGEST_BODY = 16_384, 2_048, 262_144  # bytes of a message
_CHUNK = 65_536
_HEAD = re.compile(rb"((?:[^\r\n$][^\r\n]*\r?\n)+)\r?\n")  # a line with $ begins a packet
_ANSWER = re.compile(rb"RTSP/\d\.\d (\d{3})(?: .*)?")
_REQUEST = re.compile(rb"[A-Z_]+ \S+ RTSP/\d\.\d")
_HEADER = re.compile(rb"([A-Za-z0-9_.-]+):[ \t]*(.*?)[ \t]*")


class RedirectError(Exception):
    """The server redirects."""


class ProtocolError(Exception):
    """The server sends what is no RTSP, or what FFmpeg could read in another way."""


class Answers:
    """What an RTSP server sends: messages with a head and a body, and packets of the video."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._left = 0  # bytes of a packet or a body that are still to come

    def feed(self, data: bytes) -> bytes:
        """What may be passed on by now.

        Raises:
            RedirectError: The status of an answer is 300 to 399.
            ProtocolError: A message is not plain RTSP.
        """
        self._held += data
        passed = bytearray()
        while self._held:
            if not self._left:
                self._left = self._length()
            if not self._left:
                break
            part = self._held[: self._left]
            del self._held[: self._left]
            self._left -= len(part)
            passed += part
        return bytes(passed)

    def _length(self) -> int:
        """Bytes of the packet or message that begins here; 0 while its head is not whole."""
        held = self._held
        if held[:1] == b"$":
            return 4 + int.from_bytes(held[2:4], "big") if len(held) >= 4 else 0
        found = _HEAD.match(held)
        if found is None:
            if len(held) > _LONGEST_HEAD or held.startswith((b"\r", b"\n")):
                raise ProtocolError
            return 0
        return found.end() + _body(bytes(found[1]))


def _body(head: bytes) -> int:
    """Bytes of the body behind a head."""
    first, *lines = head.replace(b"\r\n", b"\n").splitlines()
    answer = _ANSWER.fullmatch(first)
    if answer is not None and answer[1].startswith(b"3"):
        raise RedirectError
    headers = [_HEADER.fullmatch(line) for line in lines]
    longest = max(len(line) for line in (first, *lines))
    if (answer or _REQUEST.fullmatch(first)) is None or longest > _LONGEST_LINE:
        raise ProtocolError
    lengths = []
    for header in headers:
        if header is None:
            raise ProtocolError
        if header[1].lower() == b"content-length":
            lengths.append(header[2])
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit() or int(lengths[0]) > _LONGEST_BODY:
        raise ProtocolError
    return int(lengths[0])


class Relay:
    """Passes on one connection of FFmpeg to one RTSP server.

    Args:
        timeout: seconds to connect to the server.

    Attributes:
        address: what FFmpeg opens in place of the source's address.
        redirected: whether the connection was ended because the server redirects.

    Raises:
        SourceError: The server cannot be connected to, or its certificate is not valid.
    """

    def __init__(self, source: Source, timeout: float) -> None:
        parts = urlsplit(source.address)
        self.redirected = False
        self._closed = False
        self._server = _connect(source, timeout)
        self._port = socket.create_server(("127.0.0.1", 0), backlog=1)
        self._port.settimeout(timeout)
        login, mark, _ = parts.netloc.rpartition("@")
        host = f"{login}{mark}127.0.0.1:{self._port.getsockname()[1]}"
        self.address = parts._replace(scheme="rtsp", netloc=host).geturl()
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="eventful.relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End both connections."""
        self._closed = True
        for one in (self._port, self._server, self._client):
            if one is not None:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._port.close()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._client, _ = self._port.accept()
            self._port.close()
            if not self._closed:
                self._pass_on(self._client)
        except RedirectError:
            self.redirected = True
        except (OSError, ProtocolError, ValueError):  # the end of a connection, or a closed socket
            pass
        finally:
            self._server.close()
            if self._client is not None:
                self._client.close()

    def _pass_on(self, client: socket.socket) -> None:
        """Both directions in one thread: a TLS connection is not for two at once."""
        server, answers = self._server, Answers()
        with selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ)
            ready.register(server, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    data = client.recv(_CHUNK) if key.fileobj is client else _read(server)
                    if data is None:
                        continue
                    if not data:
                        return
                    if key.fileobj is client:
                        server.sendall(data)
                    else:
                        client.sendall(answers.feed(data))


def _read(server: socket.socket) -> bytes | None:
    """What a server has sent; None if it was a message of TLS itself, after which none may come."""
    patience = server.gettimeout()
    server.settimeout(0)
    try:
        data = server.recv(_CHUNK)
        while isinstance(server, ssl.SSLSocket) and server.pending():
            data += server.recv(_CHUNK)
        return data
    except ssl.SSLWantReadError:
        return None
    finally:
        server.settimeout(patience)


def _connect(source: Source, timeout: float) -> socket.socket:
    parts = urlsplit(source.address)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    problem = ""
    try:
        plain = socket.create_connection((host, port), timeout)
        if parts.scheme == "rtsp":
            return plain
        try:
            return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise
    except ssl.SSLCertVerificationError as error:
        problem = f"has no valid certificate ({error.verify_message})"
    except (OSError, UnicodeError) as error:
        problem = f"cannot be connected to ({getattr(error, 'strerror', None) or error})"
    raise SourceError(f"{source.shown} {problem}. Check the address and the network.")
