"""RTSP addresses that the page of `eventful live` opens: no redirect is followed."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from dataclasses import replace
from itertools import islice

import pytest

pytest.importorskip("av")

import rtsp
from eventful.errors import SourceError, UnsupportedError
from eventful.live.admission import Allowed, UrlRule
from eventful.pipeline.sources import open_source
from eventful.video import relay
from eventful.video.address import find_source
from eventful.video.pyav import AvDecoder
from eventful.video.relay import Answers, ProtocolError, RedirectError

OK = b"RTSP/1.0 200 OK\r\nCSeq: 1\r\n"


@pytest.fixture
def serve(tmp_path):
    """Starts servers."""
    servers = []

    def start(*args, **options) -> rtsp.RtspServer:
        servers.append(rtsp.RtspServer(tmp_path, *args, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def play(address: str, strict: bool, frames: int = 3) -> int:
    """How many pictures of an address can be read, of some."""
    source = replace(find_source(address), strict=strict)
    decoder = AvDecoder(source, timeout=60, motion=False, live=None)
    try:
        return sum(picture.height == 96 for picture in islice(decoder.pictures(), frames))
    finally:
        decoder.close()


def test_a_camera_plays_through_the_relay(serve):
    server = serve()
    assert play(f"{server.url}cam?channel=1", strict=True) == 3
    asked = [line.split()[1] for line in server.requests]
    assert all(re.sub(r":\d+/", "/", one) == "rtsp://127.0.0.1/cam?channel=1" for one in asked[:2])


@pytest.mark.parametrize("method", ["OPTIONS", "DESCRIBE", "SETUP"])
def test_a_redirect_is_not_followed(serve, method):
    target = serve()
    server = serve(
        lambda asked, number: rtsp.moved(number, target.url) if asked == method else None
    )
    with pytest.raises(UnsupportedError, match=r"redirects to another address.*Name the address"):
        play(f"{server.url}cam", strict=True)
    assert target.requests == []


def test_the_page_reads_its_addresses_in_this_way(serve):
    target = serve()
    server = serve(lambda asked, number: rtsp.moved(number, target.url))
    admitted = Allowed(urls=(UrlRule.parse(server.url),)).admit(f"{server.url}cam")
    with pytest.raises(UnsupportedError, match="redirects to another address"):
        open_source(admitted)
    assert target.requests == []


@pytest.mark.parametrize("method", ["OPTIONS", "DESCRIBE"])
def test_ffmpeg_by_itself_follows_redirects(serve, method):
    """What the relay is for: without this there would be no need of one."""
    target = serve()
    server = serve(
        lambda asked, number: rtsp.moved(number, target.url) if asked == method else None
    )
    assert play(f"{server.url}cam", strict=False) == 3
    assert target.requests != []


def test_a_server_that_is_not_there(serve):
    server = serve()
    url = server.url
    server.close()
    with pytest.raises(SourceError, match=rf"^{url}cam cannot be connected to"):
        play(url.replace("//", "//admin:hunter2@") + "cam", strict=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_are_checked(serve, tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = serve(tls=tls)
    with pytest.raises(SourceError, match="no valid certificate"):
        play(f"{server.url}cam", strict=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert play(f"{server.url}cam", strict=True) == 3


# What passes the relay

PACKET = b"$\x00\x00\x05ab\r\nc"
BODY = OK + b"Content-Length: 9\r\n\r\nv=0\r\n$\x00\x00\xff"
REQUEST = b"OPTIONS rtsp://host/ RTSP/1.0\r\nCSeq: 7\r\n\r\n"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_and_packets_pass_unchanged(size):
    content = OK + b"\r\n" + PACKET + BODY + PACKET * 2 + REQUEST + b"RTSP/1.0 401 No\nA: b\n\n"
    answers = Answers()
    parts = [content[i : i + size] for i in range(0, len(content), size)]
    assert b"".join(map(answers.feed, parts)) == content


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("before", [b"", OK + b"\r\n", PACKET, BODY, REQUEST])
@pytest.mark.parametrize("status", [b"300", b"302 Found", b"399 "])
def test_a_redirect_does_not_pass(status, before, size):
    content = before + b"RTSP/1.0 " + status + b"\r\nCSeq: 1\r\nLocation: rtsp://10.0.0.1/\r\n\r\n"
    answers, passed = Answers(), bytearray()

    def feed() -> None:
        for i in range(0, len(content), size):
            passed.extend(answers.feed(content[i : i + size]))

    with pytest.raises(RedirectError):
        feed()
    assert before.startswith(passed)


@pytest.mark.parametrize(
    "message",
    [
        b" RTSP/1.0 302 Found\r\n\r\n",
        b"RTSP/1.0  302 Found\r\n\r\n",
        b"RTSP/1.0 0302 Found\r\n\r\n",
        b"RTSP/1.0\t302 Found\r\n\r\n",
        b"\r\nRTSP/1.0 302 Found\r\n\r\n",
        b"HTTP/1.1 302 Found\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 900\r\n\r\n",
        OK + b"Content-Length: 5x\r\n\r\n",
        OK + b"Content-Length: -5\r\n\r\n",
        OK + b"Content-Length : 5\r\n\r\n",
        OK + b"Content-Length:" + b" " * 5000 + b"5\r\n\r\n",
        OK + b"Content-Length: 999999999\r\n\r\n",
        OK + b" Content-Length: 5\r\n\r\n",
        OK + b"no header\r\n\r\n",
    ],
)
def test_what_ffmpeg_could_read_in_another_way_does_not_pass(message):
    with pytest.raises(ProtocolError):
        Answers().feed(message)


@pytest.mark.parametrize("line", [b"$\x00\x00\x10", b"A: \r$\x00\x00\x01"])
def test_packets_inside_of_a_head_do_not_pass(line):
    assert Answers().feed(OK + line + b"\r\n\r\n") == b""
    with pytest.raises(ProtocolError):
        Answers().feed(OK + line + b"\r\n\r\n" + bytes(relay._LONGEST_HEAD))
