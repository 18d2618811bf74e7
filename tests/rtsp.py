"""A small RTSP server on loopback, for tests."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import av

import videos

SDP = (
    "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=test\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\n"
    "c=IN IP4 0.0.0.0\r\na=rtpmap:96 H264/90000\r\na=fmtp:96 packetization-mode=1\r\n"
    "a=control:track\r\n"
)
RATE = 25


class RtspServer:
    """Serves one video for ever, in packets between its answers.

    Args:
        answer: may replace the answer to a method, as bytes; None for the usual one.

    Attributes:
        requests: first lines of all requests.
    """

    def __init__(
        self,
        folder: Path,
        answer: Callable[[str, str], bytes | None] = lambda method, number: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.requests: list[str] = []
        self._answer, self._tls = answer, tls
        self._units = _units(videos.pan(folder / "rtsp.mp4", 12))
        self._port = socket.create_server(("127.0.0.1", 0))
        self._stopped = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return self._port.getsockname()[1]

    @property
    def url(self) -> str:
        return f"rtsp{'s' if self._tls else ''}://127.0.0.1:{self.port}/"

    def close(self) -> None:
        self._stopped = True
        with suppress(OSError):
            self._port.shutdown(socket.SHUT_RDWR)  # ends the wait for a client
        self._port.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._port.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError):
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            with client, client.makefile("rb") as requests:
                while first := requests.readline():
                    head = "".join(line.decode() for line in iter(requests.readline, b"\r\n"))
                    method = first.decode().split()[0]
                    number = re.search(r"(?i)cseq: *(\d+)", head)[1]
                    self.requests.append(first.decode().strip())
                    client.sendall(self._answer(method, number) or usual(method, number))
                    if method == "PLAY":
                        self._play(client)

    def _play(self, client: socket.socket) -> None:
        number = 0
        for picture in range(10**6):
            units = self._units[picture % len(self._units)]
            for unit in units:
                last = unit is units[-1]
                stamp = picture * 90_000 // RATE & 0xFFFFFFFF
                packet = struct.pack(">BBHII", 0x80, 96 | last << 7, number & 0xFFFF, stamp, 7)
                packet += unit
                client.sendall(b"$\0" + struct.pack(">H", len(packet)) + packet)
                number += 1
            time.sleep(1 / RATE)
            if self._stopped:
                return


def usual(method: str, number: str) -> bytes:
    """The answer of a server that has the video."""
    head, body = f"RTSP/1.0 200 OK\r\nCSeq: {number}\r\nSession: 1\r\n", ""
    if method == "DESCRIBE":
        head, body = f"{head}Content-Type: application/sdp\r\nContent-Length: {len(SDP)}\r\n", SDP
    if method == "SETUP":
        head += "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\n"
    return f"{head}\r\n{body}".encode()


def moved(number: str, target: str, status: str = "302 Found") -> bytes:
    """An answer that redirects."""
    return f"RTSP/1.0 {status}\r\nCSeq: {number}\r\nLocation: {target}\r\n\r\n".encode()


def _units(video: Path) -> list[list[bytes]]:
    """The units of H.264 in each picture of a video."""
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        convert = av.BitStreamFilterContext("h264_mp4toannexb", stream)
        packets = [made for packet in container.demux(stream) for made in convert.filter(packet)]
    start = b"\0\0\1"  # of a unit
    pictures = [bytes(packet).replace(b"\0" + start, start).split(start) for packet in packets]
    return [[unit.rstrip(b"\0") for unit in picture if unit] for picture in pictures]
