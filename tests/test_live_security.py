"""What `eventful live` refuses: each refusal is a clear answer, and changes nothing."""

# ruff: noqa: E402  (libraries that may be missing come first)
from __future__ import annotations

import json
import logging
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("timm")
av = pytest.importorskip("av")

from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import videos
from eventful.errors import ConfigError
from eventful.live import admission
from eventful.live.admission import Allowed, Refused, UrlRule, is_private
from eventful.live.app import Page, make_app
from eventful.live.guard import HEADERS, Access
from eventful.live.worker import Worker
from eventful.video.protocols import open_options
from live_pages import made, opened, tiny, wait_for

BASE = "http://127.0.0.1:8765"
SOCKET = "ws://127.0.0.1:8765/ws"
TOKEN = "a-token-of-some-length"
SECRETS = ("admin", "hunter2", "s3cret")


class Browser(TestClient):
    """A client of a page, with the page."""

    page: Page

    def snapshot(self) -> tuple:
        """All that a request could change."""
        worker = self.page.worker
        uploads = sorted(self.page.uploads.folder.iterdir())
        return worker.wanted, [channel.id for channel in worker.channels], uploads


@pytest.fixture
def browse():
    """Makes clients of pages on made-up sources."""
    open_pages = []

    def make(allowed=None, access=None, base=BASE, **options) -> Browser:
        worker = Worker(tiny(), open_footage=opened, dense_every=None, **options).start()
        page = Page(worker, allowed or Allowed())
        browser = Browser(make_app(page, access or Access()), base_url=base)
        browser.page = page
        browser.__enter__()
        open_pages.append(browser)
        return browser

    yield make
    for browser in open_pages:
        browser.__exit__(None, None, None)


@pytest.fixture
def server(tmp_path):
    """A server that counts its requests; /moved/N leads elsewhere."""
    video = videos.pan(tmp_path / "served.mp4", 12).read_bytes()
    requests: list[str] = []
    targets: dict[str, str] = {}
    direct: dict[str, int] = {}  # how often a path answers itself before it leads elsewhere

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            target = targets.get(self.path)
            if target is not None and direct.get(self.path, 0) <= 0:
                self.send_response(302)
                self.send_header("Location", target)
                self.end_headers()
                return
            direct[self.path] = direct.get(self.path, 0) - 1
            content = video
            if self.path.partition("?")[0].endswith(".m3u8"):
                content = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/segment.ts\n"
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    made_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made_server.requests, made_server.targets, made_server.direct = requests, targets, direct
    made_server.url = f"http://127.0.0.1:{made_server.server_port}"
    threading.Thread(target=made_server.serve_forever, args=(0.01,), daemon=True).start()
    yield made_server
    made_server.shutdown()
    made_server.server_close()


def add(browser, source, **more):
    return browser.post("/api/sources", json={"source": source, **more})


def refused(answer, status: int) -> str:
    """The message of a refusal."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    return answer.json()["error"]


# Who may ask


def test_loopback_needs_no_token_and_any_other_address_does():
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        Access(host)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(ConfigError, match="a token is needed"):
            Access(host)
        Access(host, TOKEN)
    with pytest.raises(ConfigError, match="at least 16"):
        Access(token="fifteen letters")


@pytest.mark.parametrize(
    ("host", "names", "asked", "good"),
    [
        ("127.0.0.1", (), "127.0.0.1:8765", True),
        ("127.0.0.1", (), "localhost:8765", True),
        ("127.0.0.1", (), "[::1]:8765", True),
        ("127.0.0.1", (), "evil.example:8765", False),  # a name that somebody points here
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "192.168.1.5", False),
        ("127.0.0.1", (), "", False),
        ("127.0.0.1", (), "[::1", False),
        ("127.0.0.1", ("box.local",), "box.local:8765", True),
        ("0.0.0.0", (), "192.168.1.5:8765", True),
        ("0.0.0.0", (), "evil.example", False),
        ("0.0.0.0", ("box.local",), "BOX.local.", True),
    ],
)
def test_the_page_is_served_under_known_names_alone(browse, host, names, asked, good):
    token = TOKEN if host == "0.0.0.0" else None
    browser = browse(access=Access(host, token, frozenset(names)))
    headers = {"Host": asked, "Authorization": f"Bearer {TOKEN}"}
    answer = browser.get("/api/state", headers=headers)
    assert answer.status_code == (200 if good else 421)


@pytest.mark.parametrize(
    ("headers", "good"),
    [
        ({"Origin": BASE}, True),
        ({}, True),  # no browser
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "http://127.0.0.1:9999"}, False),  # another program of this machine
        ({"Origin": "http://127.0.0.1:8765.evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "file://"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
    ],
)
def test_requests_of_other_pages_are_refused(browse, headers, good):
    browser = browse()
    before = browser.snapshot()
    answer = browser.patch("/api/settings", json={"paused": True}, headers=headers)
    assert answer.status_code == (200 if good else 403)
    assert (browser.snapshot() == before) is not good
    if good:
        with browser.websocket_connect(SOCKET, headers=headers):
            pass
    else:
        with pytest.raises(WebSocketDisconnect), browser.websocket_connect(SOCKET, headers=headers):
            pass
        assert not browser.page.hub.viewers


def test_a_link_from_elsewhere_opens_the_page_alone(browse):
    browser = browse()
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate",
             "Sec-Fetch-Dest": "document"}  # fmt: skip
    assert browser.get("/", headers=visit).status_code == 200
    assert browser.get("/api/state", headers=visit).status_code == 403
    assert browser.get("/", headers={**visit, "Sec-Fetch-Dest": "iframe"}).status_code == 403


def test_a_host_that_is_given_twice_is_refused(browse):
    answer = browse().get("/", headers=[("Host", "127.0.0.1"), ("Host", "evil.example")])
    assert refused(answer, 400)


def test_the_token_is_asked_for_everywhere(browse):
    browser = browse(access=Access(token=TOKEN))
    for path in ("/", "/api/state", "/metrics", "/page.js", "/nothing"):
        assert "token is needed" in refused(browser.get(path), 401)
        wrong = {"Authorization": f"Bearer {TOKEN[:-1]}"}
        assert refused(browser.get(path, headers=wrong), 401)
        assert refused(browser.get(f"{path}?token={TOKEN}x"), 401)
    assert browser.get("/healthz").text == "ok\n"
    before = browser.snapshot()
    assert refused(browser.patch("/api/settings", json={"paused": True}), 401)
    assert refused(browser.patch(f"/api/settings?token={TOKEN}", json={"paused": True}), 401)
    assert refused(add(browser, "world:7"), 401)
    with pytest.raises(WebSocketDisconnect), browser.websocket_connect(SOCKET):
        pass
    assert browser.snapshot() == before
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert browser.get("/metrics", headers=right).status_code == 200


def test_the_address_with_the_token_gives_a_cookie(browse):
    browser = browse(access=Access(token=TOKEN))
    answer = browser.get(f"/?token={TOKEN}")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert TOKEN not in cookie
    assert TOKEN not in answer.text
    assert 'url=/"' in answer.text
    assert browser.get("/api/state").status_code == 200  # the client keeps the cookie
    with browser.websocket_connect(SOCKET):
        pass
    browser.cookies.clear()
    name = cookie.partition("=")[0]
    for forged in ("", "x", TOKEN, cookie.partition("=")[2].partition(";")[0] + "x"):
        headers = {"Cookie": f"{name}={forged}"}
        assert refused(browser.get("/api/state", headers=headers), 401)


def test_every_answer_has_the_headers(browse):
    browser = browse(access=Access(token=TOKEN))
    right = {"Authorization": f"Bearer {TOKEN}"}
    for path, headers, status in (
        ("/", right, 200),
        ("/page.js", right, 200),
        ("/api/state", right, 200),
        ("/nothing", right, 404),
        ("/", {}, 401),
        ("/", {"Host": "evil.example"}, 421),
        (f"/?token={TOKEN}", {}, 200),
    ):
        answer = browser.get(path, headers=headers)
        assert answer.status_code == status
        given = {name: answer.headers.get(name) for name in HEADERS}
        assert given == HEADERS, path
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy


def test_the_page_has_no_outside_assets_and_nothing_inline():
    folder = Path(admission.__file__).parent / "page"
    assert {path.name for path in folder.iterdir()} == {
        "index.html", "page.js", "plots.js", "style.css", "icon.svg"
    }  # fmt: skip
    for path in folder.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9]", re.sub(r"^\s*// .*$", "", text, flags=re.M))
    html = (folder / "index.html").read_text()
    assert re.findall(r"<script(?! type=\"module\" src=)|<style|\sstyle=|\son[a-z]+=", html) == []


# Bad requests

JSON = "application/json"
BAD = [
    ("PATCH", "/api/settings", b"{}", "text/plain", 415),
    ("PATCH", "/api/settings", b"{}", None, 415),
    ("PATCH", "/api/settings", b"{", JSON, 400),
    ("PATCH", "/api/settings", b"\xff", JSON, 400),
    ("PATCH", "/api/settings", b'{"share": NaN}', JSON, 400),
    ("PATCH", "/api/settings", b"[" * 9999, JSON, 400),
    ("PATCH", "/api/settings", b"[]", JSON, 422),
    ("PATCH", "/api/settings", b'{"share": 0}', JSON, 422),
    ("PATCH", "/api/settings", b'{"share": 1.01}', JSON, 422),
    ("PATCH", "/api/settings", b'{"share": -1}', JSON, 422),
    ("PATCH", "/api/settings", b'{"share": "10"}', JSON, 422),
    ("PATCH", "/api/settings", b'{"share": true}', JSON, 422),
    ("PATCH", "/api/settings", b'{"preset": "slow"}', JSON, 422),
    ("PATCH", "/api/settings", b'{"preset": null}', JSON, 422),
    ("PATCH", "/api/settings", b'{"paused": 1}', JSON, 422),
    ("PATCH", "/api/settings", b'{"paused": true, "share": 7}', JSON, 422),
    ("PATCH", "/api/settings", b'{"paused": true, "other": 1}', JSON, 422),
    ("PATCH", "/api/settings", b'{"preset": "' + b"x" * 20_000 + b'"}', JSON, 413),
    ("POST", "/api/settings", b"{}", JSON, 405),
    ("POST", "/api/reset", b'{"source": "s9"}', JSON, 404),
    ("POST", "/api/reset", b'{"source": 1}', JSON, 422),
    ("POST", "/api/sources", b"{}", JSON, 422),
    ("POST", "/api/sources", b'{"source": ""}', JSON, 422),
    ("POST", "/api/sources", b'{"source": ["world:7"]}', JSON, 422),
    ("POST", "/api/sources", b'{"source": "world:7", "loop": "yes"}', JSON, 422),
    ("POST", "/api/sources", b'{"source": "world:7\\u0000"}', JSON, 422),
    ("POST", "/api/sources", json.dumps({"source": "x" * 3000}).encode(), JSON, 422),
    ("DELETE", "/api/sources/s9", b"", None, 404),
    ("DELETE", "/api/sources/..%2f..", b"", None, 404),
    ("GET", "/nothing", b"", None, 404),
    ("GET", "/docs", b"", None, 404),
    ("GET", "/openapi.json", b"", None, 404),
    ("GET", "/../app.py", b"", None, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "kind", "status"), BAD)
def test_a_bad_request_is_answered_and_changes_nothing(browse, method, path, body, kind, status):
    browser = browse()
    before = browser.snapshot()
    headers = {} if kind is None else {"Content-Type": kind}
    answer = browser.request(method, path, content=body, headers=headers)
    message = refused(answer, status)
    assert message.endswith(".")
    assert "xxxx" not in message  # what was sent is not repeated
    assert browser.snapshot() == before


def test_good_requests_change_what_they_say(browse):
    browser = browse()
    assert browser.patch("/api/settings", json={"share": 0.5}).json()["share"] == 0.5
    assert browser.patch("/api/settings", json={"share": 1}).json()["share"] == 1
    answer = browser.patch("/api/settings", json={"preset": "paper", "share": None}).json()
    assert (answer["preset"], answer["share"], answer["needs_share"]) == ("paper", 0.2, True)
    answer = browser.patch("/api/settings", json={"preset": "fast"}).json()
    assert (answer["share"], answer["automatic"]) == (None, True)
    made_one = add(browser, "world:7?size=32x48&exposures=1&frames=4")
    assert made_one.status_code == 201
    assert browser.post("/api/reset", json={}).status_code == 200
    assert browser.delete(f"/api/sources/{made_one.json()['id']}").status_code == 200
    assert browser.page.worker.channels == []


# Number and kinds of sources


def test_there_are_so_many_sources_and_no_more(browse):
    browser = browse(most=2)
    for _ in range(2):
        browser.page.worker.add(made())
    before = browser.snapshot()
    assert "2 sources" in refused(add(browser, "world:7"), 409)
    assert refused(browser.post("/api/uploads?name=a.mp4", content=b"x"), 409)
    assert browser.snapshot() == before


def test_there_are_so_many_viewers_and_no_more(browse):
    browser = browse()
    browser.page.hub.most = 1
    with browser.websocket_connect(SOCKET) as first:
        first.receive_json()
        with pytest.raises(WebSocketDisconnect), browser.websocket_connect(SOCKET) as second:
            second.receive_json()
        assert len(browser.page.hub.viewers) == 1


@pytest.mark.parametrize(
    "source",
    ["world:street", "world:7?frames=100000", "world:7?size=9999x9999", "world:7?device=cuda",
     "world:7?exposures=99", "world:7?size=0x0", "world:-1", "world:99999999999999999999",
     "ftp://host/a.mp4", "file:///etc/passwd", "concat:a|b", "data:,x", "lavfi:testsrc"],
)  # fmt: skip
def test_other_kinds_are_refused(browse, tmp_path, source):
    browser = browse(Allowed(folders=(tmp_path,)))
    before = browser.snapshot()
    answer = add(browser, source)
    assert refused(answer, answer.status_code)
    assert answer.status_code in (403, 404, 422)
    assert browser.snapshot() == before


def test_cameras_are_refused_unless_they_are_allowed(browse):
    assert "--allow-camera" in refused(add(browse(), "camera:0"), 403)
    allowed = Allowed(cameras=True)
    assert allowed.admit("camera:0").address == "camera:0"
    for name in ("camera:/dev/video0", "camera:", "camera:../x"):
        assert refused(add(browse(allowed), name), 422)


# Files


@pytest.fixture
def folder(tmp_path):
    """An allowed folder, and secrets beside it."""
    inside = tmp_path / "allowed"
    (inside / "deeper").mkdir(parents=True)
    videos.pan(inside / "a.mp4", 4)
    videos.pan(inside / "deeper" / "b.mp4", 4)
    videos.pan(tmp_path / "secret.mp4", 4)
    videos.pan(tmp_path / "allowed-not.mp4", 4)
    videos.images(inside / "pictures", 3)
    videos.images(tmp_path / "others", 3)
    (inside / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    (inside / "up").symlink_to(tmp_path)
    mixed = videos.images(inside / "mixed", 1)
    (mixed / "9.png").symlink_to(tmp_path / "others" / "0.png")
    (inside / "list.streams").write_text("a = /etc/passwd\n")
    (inside / "notes.txt").write_text("a secret")
    return inside


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("a.mp4", 201),
        ("deeper/b.mp4", 201),
        ("deeper/../a.mp4", 201),
        ("{folder}/a.mp4", 201),
        ("pictures", 201),
        ("{folder}/../secret.mp4", 403),
        ("../secret.mp4", 403),
        ("../nothing.mp4", 403),  # whether it is there is not told
        ("../allowed-not.mp4", 403),
        ("/etc/passwd", 403),
        ("link.mp4", 403),
        ("up/secret.mp4", 403),
        ("mixed", 403),
        ("file:{folder}/../secret.mp4", 404),
        ("nothing.mp4", 404),
        ("list.streams", 422),
        ("notes.txt", 422),
        ("*.mp4", 404),
        ("deeper", 422),
        ("~/a.mp4", 404),
    ],
)
def test_paths_outside_of_the_allowed_folder_are_refused(browse, folder, source, status):
    browser = browse(Allowed(folders=(folder,)))
    before = browser.snapshot()
    answer = add(browser, source.format(folder=folder))
    if status == 201:
        assert answer.status_code == 201, answer.text
        [channel] = browser.page.worker.channels
        wait_for(lambda: channel.feed.arrived)
        assert str(folder) not in json.dumps(browser.get("/api/state").json())
    else:
        assert refused(answer, status)
        assert browser.snapshot() == before


def test_without_an_allowed_folder_no_path_is_opened(browse, folder):
    assert "--allow-folder" in refused(add(browse(), str(folder / "a.mp4")), 403)


# Addresses

RULES = (UrlRule.parse("http://cams.example/videos/"), UrlRule.parse("rtsp://10.0.0.5:8554/"))


@pytest.mark.parametrize(
    ("address", "good"),
    [
        ("http://cams.example/videos/a.mp4", True),
        ("http://cams.example:80/videos/a.mp4?x=1", True),
        ("http://CAMS.example/videos/deeper/a.mp4", True),
        ("http://user:word@cams.example/videos/a.mp4", True),
        ("rtsp://10.0.0.5:8554/stream", True),
        ("https://cams.example/videos/a.mp4", False),
        ("http://cams.example:8080/videos/a.mp4", False),
        ("http://cams.example/", False),
        ("http://cams.example/videosecret/a.mp4", False),
        ("http://cams.example/videos/../secret.mp4", False),
        ("http://cams.example/videos/%2e%2e/secret.mp4", False),
        ("http://cams.example/videos/%252e%252e/secret.mp4", False),
        ("http://cams.example/videos/..\\secret.mp4", False),
        ("http://cams.example@evil.example/videos/a.mp4", False),
        ("http://evil.example/cams.example/videos/", False),
        ("http://cams.example.evil.example/videos/a.mp4", False),
        ("http://evil.example#@cams.example/videos/a.mp4", False),
        ("http://cams.example\\@evil.example/videos/a.mp4", False),
        ("http://127.0.0.1/videos/a.mp4", False),
        ("http://[::1]/videos/a.mp4", False),
        ("http://cams.example:99999/videos/a.mp4", False),
        ("rtsp://10.0.0.5/stream", False),
        ("rtsp://10.0.0.55:8554/stream", False),
        ("http:///videos/a.mp4", False),
    ],
)
def test_addresses_outside_of_the_allow_list_are_refused(monkeypatch, address, good):
    asked = []
    monkeypatch.setattr(admission, "_redirect", lambda text: asked.append(text))
    allowed = Allowed(urls=RULES)
    if good:
        source = allowed.admit(address)
        assert source.listed is not None
        assert source.listed.strict
        assert "word" not in source.name
    else:
        with pytest.raises(Refused) as caught:
            allowed.admit(address)
        assert caught.value.status in (403, 422)
        assert asked == []  # nobody was asked


def test_without_an_allow_list_nothing_is_connected_to(browse, server):
    assert "--allow-url" in refused(add(browse(), f"{server.url}/a.mp4"), 403)
    assert server.requests == []


def test_an_allowed_address_plays(browse, server):
    browser = browse(Allowed(urls=(UrlRule.parse(server.url),)))
    assert add(browser, f"{server.url}/a.mp4").status_code == 201
    [channel] = browser.page.worker.channels
    wait_for(lambda: channel.steps >= 1)


def test_redirects_to_private_addresses_are_refused(browse, server):
    server.targets["/moved"] = f"http://127.0.0.1:{server.server_port}/secret.mp4"
    browser = browse(Allowed(urls=(UrlRule.parse(server.url),)))  # the target is allowed, too
    before = browser.snapshot()
    assert "a private address" in refused(add(browser, f"{server.url}/moved"), 403)
    assert browser.snapshot() == before
    assert server.requests == ["/moved"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("http://elsewhere.example/a.mp4", "not among the allowed addresses"),
        ("file:///etc/passwd", "no HTTP address"),
        ("rtsp://10.0.0.5/", "no HTTP address"),
        ("/moved", "more than 4 times"),
    ],
)
def test_other_redirects_are_refused(browse, server, monkeypatch, target, message):
    monkeypatch.setattr(admission, "is_private", lambda host, port: False)
    server.targets["/moved"] = target
    browser = browse(Allowed(urls=(UrlRule.parse(server.url),)))
    assert message in refused(add(browser, f"{server.url}/moved"), 403)
    assert set(server.requests) == {"/moved"}


def test_an_allowed_redirect_is_followed(browse, server, monkeypatch):
    monkeypatch.setattr(admission, "is_private", lambda host, port: False)
    server.targets["/moved"] = "/a.mp4"
    browser = browse(Allowed(urls=(UrlRule.parse(server.url),)))
    assert add(browser, f"{server.url}/moved").status_code == 201
    [channel] = browser.page.worker.channels
    wait_for(lambda: channel.steps >= 1)


def test_a_redirect_that_comes_later_is_not_followed(browse, server):
    """The first answer is a video, the second one, to FFmpeg, leads elsewhere."""
    server.targets["/moved"] = f"{server.url}/secret.mp4"
    server.direct["/moved"] = 1
    browser = browse(Allowed(urls=(UrlRule.parse(server.url),)))
    assert add(browser, f"{server.url}/moved").status_code == 201
    [channel] = browser.page.worker.channels
    wait_for(lambda: channel.feed.status == "dead")
    assert "/secret.mp4" not in server.requests


def test_a_playlist_at_an_allowed_address_is_not_followed(browse, server):
    browser = browse(Allowed(urls=(UrlRule.parse(server.url),)))
    assert add(browser, f"{server.url}/list.m3u8").status_code == 201
    [channel] = browser.page.worker.channels
    wait_for(lambda: channel.feed.status == "dead")
    assert "/segment.ts" not in server.requests


def test_what_ffmpeg_may_open_at_an_address_of_the_page():
    options = open_options(av, "http", strict=True)
    assert options["max_redirects"] == "0"
    assert not {"hls", "dash", "concat", "sdp"} & set(options["format_whitelist"].split(","))


@pytest.mark.parametrize(
    ("addresses", "private"),
    [
        (["93.184.216.34"], False),
        (["2606:2800:220:1::1"], False),
        (["127.0.0.1"], True),
        (["10.1.2.3"], True),
        (["172.16.0.1"], True),
        (["192.168.0.1"], True),
        (["169.254.169.254"], True),
        (["100.64.0.1"], True),
        (["0.0.0.0"], True),
        (["::1"], True),
        (["fe80::1%eth0"], True),
        (["fd00::1"], True),
        (["::ffff:127.0.0.1"], True),
        (["93.184.216.34", "10.0.0.1"], True),  # one of its addresses is enough
        ([], True),
    ],
)
def test_private_addresses_are_recognised(addresses, private):
    def resolve(host, port, type):
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    assert is_private("host", 80, resolve) is private


def test_credentials_are_shown_nowhere(browse, server, caplog):
    caplog.set_level(logging.DEBUG)
    host = urlsplit(server.url).netloc
    browser = browse(Allowed(urls=(UrlRule.parse(server.url),)))
    answers = [
        add(browser, f"http://admin:hunter2@{host}/nothing.m3u8?key=s3cret"),
        add(browser, "http://admin:hunter2@evil.example/?key=s3cret"),
        add(browser, "rtsp://admin:hunter2@evil.example/"),
        add(browser, "http://admin:hunter2@[bad/?key=s3cret"),
        add(browser, "ftp://admin:hunter2@host/"),
        browser.patch("/api/settings", json={"preset": "admin:hunter2"}),
        browser.patch("/api/settings", json={"admin:hunter2": 1}),
    ]
    [channel] = browser.page.worker.channels
    wait_for(lambda: channel.feed.status == "dead")
    with browser.websocket_connect(SOCKET) as socket:
        state = socket.receive_text()
    shown = [answer.text for answer in answers]
    shown += [state, browser.get("/api/state").text, browser.get("/metrics").text, caplog.text]
    shown += [repr(channel.feed.source), channel.feed.message]
    assert host in state
    for text in shown:
        assert not any(secret in text for secret in SECRETS), text


# Uploads


def upload(browser, content, name="clip.mp4", **options):
    return browser.post("/api/uploads", params={"name": name}, content=content, **options)


def test_an_upload_plays_and_goes_with_its_source(browse, tmp_path):
    content = videos.pan(tmp_path / "clip.mp4", 6, step=(2, 2)).read_bytes()
    browser = browse()
    made_one = upload(browser, content, "../../my clip.mp4")
    assert made_one.status_code == 201, made_one.text
    assert made_one.json()["name"] == "my clip.mp4"
    [channel] = browser.page.worker.channels
    wait_for(lambda: channel.steps >= 2)
    [file] = browser.page.uploads.folder.iterdir()
    assert file.name != "my clip.mp4"
    assert str(file) not in browser.get("/api/state").text
    browser.delete(f"/api/sources/{channel.id}")
    assert not file.exists()
    folder = browser.page.uploads.folder
    browser.page.close()
    assert not folder.exists()


def parts(count: int, size: int):
    for _ in range(count):
        yield b"x" * size


@pytest.mark.parametrize(
    ("content", "name", "headers", "status"),
    [
        (b"x" * 2001, "a.mp4", {}, 413),
        (lambda: parts(30, 100), "a.mp4", {}, 413),  # without a length
        (b"x" * 100, "a.mp4", {"Content-Length": "99999"}, 413),
        (b"x" * 100, "a.mp4", {}, 422),
        (b"", "a.mp4", {}, 422),
        (b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", "a.mp4", {}, 422),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "a.ts", {}, 422),
        (b"x" * 100, "a.exe", {}, 415),
        (b"x" * 100, "a.m3u8", {}, 415),
        (b"x" * 100, "a.streams", {}, 415),
        (b"x" * 100, "", {}, 415),
        (b"x" * 100, "mp4", {}, 415),
    ],
)
def test_bad_uploads_are_refused_and_leave_nothing(browse, content, name, headers, status):
    browser = browse(Allowed(upload_bytes=2000))
    before = browser.snapshot()
    given = content() if callable(content) else content
    assert refused(upload(browser, given, name, headers=headers), status)
    assert browser.snapshot() == before
    assert not browser.page.uploads.busy


def test_uploads_can_be_switched_off_and_come_one_at_a_time(browse):
    assert refused(upload(browse(Allowed(upload_bytes=0)), b"x"), 403)
    browser = browse()
    browser.page.uploads.busy = True
    assert refused(upload(browser, b"x"), 409)
