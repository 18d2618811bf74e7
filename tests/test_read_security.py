"""What `eventful.read` must not open, and what it must not show."""

from __future__ import annotations

import logging
import socket
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import eventful
import videos
from eventful.errors import ConfigError, EventfulError, SourceError, UnsupportedError
from eventful.video.address import find_source, without_credentials

av = pytest.importorskip("av")

SECRETS = ("admin", "hunter2", "s3cret")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A good video, beside which playlists are written."""
    return videos.pan(tmp_path_factory.mktemp("target") / "target.ts", 12)


@pytest.fixture
def server(target):
    """A server that counts its requests; a path that ends in .m3u8 names a file and an address."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            content = target.read_bytes()
            if self.path.endswith(".m3u8"):
                content = playlist(f"file://{target}").encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.requests = requests
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def playlist(*entries: str) -> str:
    lines = "".join(f"#EXTINF:1,\n{entry}\n" for entry in entries)
    return f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n{lines}#EXT-X-ENDLIST\n"


LISTS = {
    "m3u8": playlist("target.ts"),
    "m3u8 of an address": playlist("{address}/a.ts"),
    "ffconcat": "ffconcat version 1.0\nfile target.ts\n",
    "ffconcat of an address": "ffconcat version 1.0\nfile {address}/a.ts\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    "m=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    "mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
    'mediaPresentationDuration="PT1S" profiles="urn:mpeg:dash:profile:isoff-on-demand:2011">'
    '<Period><AdaptationSet mimeType="video/mp4"><Representation id="1" bandwidth="1">'
    "<BaseURL>{address}/a.mp4</BaseURL></Representation></AdaptationSet></Period></MPD>",
}


@pytest.mark.parametrize("suffix", [".mp4", None], ids=["as a video", "by its name"])
@pytest.mark.parametrize("kind", LISTS)
def test_playlists_in_files_are_not_followed(target, server, kind, suffix):
    address = f"http://127.0.0.1:{server.server_port}"
    path = target.with_name(f"list{suffix or '.' + kind.split()[0]}")
    path.write_text(LISTS[kind].format(address=address))
    with pytest.raises(UnsupportedError, match="is a playlist"):
        eventful.read(path)
    assert server.requests == []


def test_a_playlist_at_an_address_names_no_file(target, server):
    with pytest.raises(EventfulError):
        list(eventful.read(f"http://127.0.0.1:{server.server_port}/list.m3u8", timeout=3))
    assert server.requests
    assert len(list(eventful.read(f"http://127.0.0.1:{server.server_port}/a.ts", live=False))) == 12


@pytest.mark.parametrize(
    ("source", "protocols", "lists"),
    [
        ("{file}", {"file"}, set()),
        ("camera:0", {"file"}, None),
        ("http://host/a.mp4", {"http", "https", "tcp", "tls", "crypto"}, {"hls", "dash"}),
        ("https://host/a.mp4", {"http", "https", "tcp", "tls", "crypto"}, {"hls", "dash"}),
        ("rtsp://host/a", {"rtsp", "rtsps", "rtp", "udp", "tcp", "tls"}, set()),
        ("rtsps://host/a", {"rtsp", "rtsps", "rtp", "udp", "tcp", "tls"}, set()),
    ],
)
def test_what_ffmpeg_may_open(target, monkeypatch, source, protocols, lists):
    given = {}

    def opened(address, **options):
        given.update(options["options"], timeout=options["timeout"])
        raise av.error.InvalidDataError(1, "as asked", address)

    monkeypatch.setattr(av, "open", opened)
    with pytest.raises(EventfulError, match="as asked"):
        eventful.read(source.format(file=target), timeout=3)
    assert set(given["protocol_whitelist"].split(",")) == protocols
    assert given["timeout"] == (None if "{" in source else (3, 3))
    if lists is not None:
        formats = set(given["format_whitelist"].split(","))
        assert formats & {"hls", "dash", "concat", "sdp", "image2", "lavfi"} == lists


@pytest.mark.parametrize("name", ["concat:a.mp4|b.mp4", "subfile,,start,0,end,9,,:a", "data:,x"])
def test_names_that_ffmpeg_takes_for_protocols(name):
    with pytest.raises(EventfulError):
        eventful.read(name)


def test_a_file_whose_name_looks_like_a_protocol(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("concat:a.ts", "http:b.ts", "50%d.ts"):
        (tmp_path / name).write_bytes(target.read_bytes())
        assert len(list(eventful.read(name))) == 12


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("rtsp://admin:hunter2@cam:554/s1", "rtsp://cam:554/s1"),
        ("rtsp://admin:hun@hunter2@cam/s1", "rtsp://cam/s1"),
        ("rtsp://admin:a/hunter2@cam/s1", "rtsp://cam/s1"),
        ("rtsp://admin:a#hunter2@cam/s1", "rtsp://cam/s1"),
        ("rtsp://admin:a?hunter2@cam/s1", "rtsp://cam/s1"),
        ("https://cam/a.mp4?token=s3cret&x=1", "https://cam/a.mp4?..."),
        ("https://cam?token=s3cret", "https://cam?..."),
        ("rtsp://cam/user=admin&password=hunter2", "rtsp://cam/user=...&password=..."),
        ("http://cam/@street/live", "http://cam/@street/live"),
        ("http://[::1]:80/a", "http://[::1]:80/a"),
    ],
)
def test_addresses_are_shown_without_credentials(address, shown):
    assert without_credentials(address) == shown
    source = find_source(address)
    assert source.shown == shown
    assert not any(secret in repr(source) for secret in SECRETS)


def everything(error: BaseException) -> str:
    """All that an error and those behind it show."""
    parts = []
    while error is not None:
        parts += [str(error), repr(error), repr(error.args), repr(vars(error))]
        parts += traceback.format_exception(error)
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


@pytest.mark.parametrize(
    "address",
    [
        "http://admin:hunter2@127.0.0.1:{port}/a.mp4?token=s3cret",
        "rtsp://admin:hunter2@127.0.0.1:{port}/a",
        "ftp://admin:hunter2@127.0.0.1/a",
        "admin:hunter2@127.0.0.1/a",
    ],
)
def test_credentials_are_in_no_error(address, caplog):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    caplog.set_level(logging.DEBUG)
    with pytest.raises((SourceError, ConfigError)) as caught:
        eventful.read(address.format(port=port), timeout=2)
    text = everything(caught.value) + caplog.text
    assert "127.0.0.1" in text
    assert not [secret for secret in SECRETS if secret in text]


def test_credentials_are_in_no_attribute(server):
    address = f"http://admin:hunter2@127.0.0.1:{server.server_port}/a.ts?token=s3cret"
    with eventful.read(address, live=False) as reader:
        frames = list(reader)
        shown = [repr(reader), reader.source, frames[0].source, repr(frames[0].infos)]
    assert len(frames) == 12
    assert not [secret for secret in SECRETS if secret in "".join(shown)]


def test_credentials_in_a_list_are_not_shown(tmp_path):
    path = tmp_path / "a.streams"
    path.write_text("gate = ftp://admin:hunter2@host/a\n")
    with pytest.raises(EventfulError, match="line 1") as caught:
        eventful.read(path)
    assert not [secret for secret in SECRETS if secret in everything(caught.value)]


@pytest.mark.parametrize("scheme", ["http", "rtsp"])
def test_a_host_that_does_not_answer(scheme):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        with pytest.raises(SourceError, match=r"sent nothing for 0\.3 s.*timeout") as caught:
            eventful.read(
                f"{scheme}://admin:hunter2@127.0.0.1:{silent.getsockname()[1]}/a", timeout=0.3
            )
    assert time.monotonic() - start < 9  # less than the usual 10 s
    assert "hunter2" not in everything(caught.value)


def test_a_host_that_stops_sending(target):
    """Half a video, then silence: an error in the middle of the loop."""
    content, over = target.read_bytes(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) * 3 // 4])
            self.wfile.flush()
            over.wait(60)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://admin:hunter2@127.0.0.1:{server.server_port}/a.ts"
    with pytest.raises(SourceError, match=r"sent nothing for 0\.5 s") as caught:
        list(eventful.read(address, timeout=0.5, live=False))
    over.set()
    assert "hunter2" not in everything(caught.value)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "address",
    [
        *(
            "rtsp:///{}@cam/x",
            "rtsp//{}@cam/x",
            "rtsp ://{}@cam/x",
            "htp://{}@cam/x",
            "rtsp;//{}@x",
        ),
        *("//{}@cam/x", "{}@cam/x", "rtsp:{}@cam/x", "rtsp//{}@cam/*.jpg"),
    ],
)
def test_a_mistyped_address_does_not_show_its_password(address):
    for more in ("", "?key=hunter2", "/user=u&password=hunter2"):
        with pytest.raises(EventfulError) as caught:
            find_source(address.format("admin:hunter2") + more)
        assert "hunter2" not in str(caught.value)
        assert address.partition("@")[2] in str(caught.value)


def test_a_file_with_such_a_name_is_named():
    with pytest.raises(EventfulError, match=r"holiday@sea\.mp4 is not there"):
        find_source("clips/holiday@sea.mp4")
