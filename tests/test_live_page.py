"""The page of `eventful live` in Chromium: what a user sees and does."""

# ruff: noqa: E402  (libraries that may be missing come first)
from __future__ import annotations

import re
import shutil
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("timm")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no chromium on this machine", allow_module_level=True)

import videos
from eventful.live import viewers
from eventful.live.admission import Allowed
from eventful.live.guard import Access
from live_pages import Turns, made, serving, stepped, wait_for

WAIT = 60_000  # milliseconds


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as start:
        browser = start.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Opens pages; the console must stay empty."""
    contexts, complaints = [], []

    def open_page(url: str, **options):
        context = chromium.new_context(**options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda message: complaints.append(f"{message.text} {message.location['url']}"),
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "requestfailed", lambda request: complaints.append(f"{request.failure} {request.url}")
        )
        page.goto(url)
        return page

    # The server ends before the browser; a page that is left cancels what it asked for.
    open_page.expected = ["ERR_CONNECTION_REFUSED", "ERR_ABORTED"]
    yield open_page
    for context in contexts:
        context.close()
    others = [c for c in complaints if not any(text in c for text in open_page.expected)]
    assert others == []


def tile(page, number: str = "s1"):
    return page.locator(f'.tile[data-id="{number}"]')


def plays(page, number: str = "s1") -> None:
    """A picture is there, and later ones follow."""
    canvas = tile(page, number).locator("canvas[data-number]")
    canvas.wait_for()
    before = int(canvas.get_attribute("data-number"))
    page.wait_for_function(
        "([id, number]) => Number(document.querySelector(`.tile[data-id=${id}] canvas`)"
        ".dataset.number) > number",
        arg=[number, before],
    )


def value(page, name: str, number: str = "s1") -> str:
    return tile(page, number).locator(f'[data-of="{name}"]').inner_text()


def set_share(page, percent: int) -> None:
    page.locator("#share").evaluate(
        "(slider, percent) => { slider.value = percent; "
        "slider.dispatchEvent(new Event('input')); }",
        percent,
    )


def tokens(page, low: int, high: int, number: str = "s1") -> None:
    """Wait until the share of tokens that the page shows lies between two numbers."""
    page.wait_for_function(
        "([id, low, high]) => { const text = document.querySelector("
        "`.tile[data-id=${id}] [data-of=tokens]`).textContent;"
        "const value = parseInt(text); return value >= low && value <= high; }",
        arg=[number, low, high],
    )


def painted(page, number: str = "s1") -> bool:
    """Whether the canvas shows more than one colour."""
    return page.evaluate(
        "(id) => { const c = document.querySelector(`.tile[data-id=${id}] canvas`);"
        "const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return new Set(data).size > 16; }",
        number,
    )


def test_it_starts_and_plays(visit):
    with serving("part=0.3") as served:
        page = visit(served.url)
        plays(page)
        assert painted(page)
        assert page.locator("#link").inner_text() == "connected"
        assert tile(page).locator(".badge").inner_text() == "running"
        page.wait_for_function(
            "() => document.querySelector('#numbers').rows[0].cells[4].textContent != '–'"
        )
        row = page.locator("#numbers tr").first.inner_text().split("\t")
        assert row[1] == "running"
        assert "dense" in page.locator("#plot-ms").get_attribute("aria-label")


def test_the_slider_changes_the_measured_tokens(visit):
    with serving("part=1") as served:
        page = visit(served.url)
        plays(page)
        set_share(page, 10)
        tokens(page, 5, 35)
        assert page.locator("#share-value").inner_text() == "10 %"
        assert not page.locator("#automatic").is_checked()
        set_share(page, 100)
        tokens(page, 100, 100)
        for percent in range(90, 9, -1):  # dragged fast: the last value counts
            set_share(page, percent)
        tokens(page, 5, 35)
        wait_for(lambda: served.worker.wanted.share == 0.1)
        page.locator("#automatic").check()
        page.wait_for_function("() => document.querySelector('#share-value').textContent == 'auto'")
        wait_for(lambda: served.worker.wanted.share is None)


def test_a_second_stream_comes_and_goes(visit):
    with serving("") as served:
        page = visit(served.url)
        plays(page)
        page.fill("#source", "world:7?size=32x48&exposures=1&frames=8")
        page.click("#add button[type=submit]")
        plays(page, "s2")
        assert page.locator(".tile").count() == 2
        assert page.locator("#key li").count() == 3  # two streams and the dense model
        page.get_by_role("button", name="Remove world:7").click()
        tile(page, "s2").wait_for(state="detached")
        plays(page)
        page.get_by_role("button", name="Remove made:").click()
        page.locator("#empty").wait_for()
        assert page.locator("#numbers tr").count() == 0
        served.worker.add(made())
        plays(page, "s3")


def test_a_dead_source_shows_as_dead_and_the_others_go_on(visit):
    with serving("", "frames=20&then=die", "then=refuse") as served:
        page = visit(served.url)
        for number, why in (("s2", "unplugged"), ("s3", "does not answer")):
            tile(page, number).locator('.badge[data-state="dead"]').wait_for()
            assert why in tile(page, number).locator(".why").inner_text()
        plays(page, "s1")
        assert re.fullmatch(r"[\d.]+ s ago", value(page, "staleness", "s2"))
        assert value(page, "staleness", "s3") == "none"


def test_a_refused_source_says_why(visit):
    with serving("") as served:
        page = visit(served.url)
        plays(page)
        page.fill("#source", "/etc/passwd")
        page.click("#add button[type=submit]")
        page.locator("#problem:not([hidden])").wait_for()
        assert "--allow-folder" in page.locator("#problem").inner_text()
        assert page.locator(".tile").count() == 1
        page.fill("#source", "world:7?size=32x48&exposures=1&frames=8")
        page.click("#add button[type=submit]")
        plays(page, "s2")
        assert page.locator("#problem").is_hidden()
        visit.expected.append("403 (Forbidden)")  # Chromium writes such answers to the console


def test_presets_pause_and_reset(visit):
    with serving("part=0.2") as served:
        page = visit(served.url)
        plays(page)
        page.select_option("#preset", "dense")
        tokens(page, 100, 100)
        assert page.locator("#share").is_disabled()
        page.select_option("#preset", "stgt")
        tokens(page, 1, 60)
        assert page.locator("#automatic").is_disabled()
        page.select_option("#preset", "fast")
        page.wait_for_function("() => !document.querySelector('#automatic').disabled")
        page.click("#pause")
        tile(page).locator('.badge[data-state="paused"]').wait_for()
        assert page.locator("#pause").get_attribute("aria-pressed") == "true"
        wait_for(lambda: served.worker._applied.paused)  # the step that was under way is done
        [channel] = served.worker.channels
        steps, seen = channel.steps, channel.feed.arrived
        wait_for(lambda: channel.feed.arrived >= seen + 15)
        assert channel.steps == steps
        page.click("#pause")
        plays(page)
        steps = served.worker.channels[0].steps
        page.click("#reset")
        wait_for(lambda: channel.state()["first"] > steps)
        assert page.locator("#problem").is_hidden()
        stepped(served.worker, 2)


@pytest.mark.slow
def test_reset_clears_the_plots(visit, monkeypatch):
    with serving("") as served, Turns(monkeypatch) as turns:
        page = visit(served.url)
        count = "(count) => document.querySelector('#plot-ms').dataset.points == count"
        turns.let(20)
        page.wait_for_function(count, arg=20)
        wait_for(lambda: turns.waiting)
        page.get_by_role("button", name="Reset made:").click()
        wait_for(lambda: served.worker._resets)
        turns.let(3)  # the first of them was under way
        page.wait_for_function(count, arg=2)


@pytest.mark.slow
def test_overlays_change_the_picture(visit):
    with serving("frames=6&part=0.4") as served:
        page = visit(served.url)
        tile(page).locator('.badge[data-state="ended"]').wait_for()
        [channel] = served.worker.channels
        wait_for(lambda: channel.steps + channel.feed.dropped == 6)
        tile(page).locator(f'canvas[data-number="{channel.steps}"]').wait_for()
        picture = "document.querySelector('.tile canvas').toDataURL()"
        seen = [page.evaluate(picture)]
        for overlay in ("mask", "error"):
            page.check(f"input[name=overlay][value={overlay}]")
            page.wait_for_function(f"(seen) => !seen.includes({picture})", arg=seen)
            seen.append(page.evaluate(picture))
        page.check("input[name=overlay][value=none]")
        page.wait_for_function(f"(first) => {picture} == first", arg=seen[0])


@pytest.mark.slow
def test_a_reload_goes_on_where_it_was(visit):
    with serving("") as served:
        page = visit(served.url)
        plays(page)
        set_share(page, 30)
        tokens(page, 20, 50)
        stepped(served.worker, 20)
        page.reload()
        plays(page)
        assert page.locator("#share-value").inner_text() == "30 %"
        wait_for(lambda: len(served.page.hub.viewers) == 1)
        points = page.evaluate("document.querySelector('#plot-ms').getAttribute('aria-label')")
        assert "made:" in points


@pytest.mark.slow
def test_two_viewers_see_the_same_settings(visit):
    with serving("") as served:
        one, other = visit(served.url), visit(served.url)
        plays(one)
        plays(other)
        set_share(one, 40)
        other.wait_for_function(
            "() => document.querySelector('#share-value').textContent == '40 %'"
        )


def test_the_connection_comes_back(visit):
    with serving("") as served:
        page = visit(served.url)
        plays(page)
        before = set(served.page.hub.viewers)
        for viewer in before:
            viewer.take = None  # the server ends the connection
        wait_for(lambda: served.page.hub.viewers and not served.page.hub.viewers & before)
        plays(page)
        assert page.locator("#link").inner_text() == "connected"


def test_keys_do_what_the_footer_says(visit, monkeypatch):
    monkeypatch.setattr(viewers, "EVERY", 60.0)  # keys act without waiting for the next state
    with serving("") as served:
        page = visit(served.url)
        plays(page)
        page.keyboard.press("m")
        assert page.locator("input[value=mask]").is_checked()
        page.keyboard.press("e")
        assert page.locator("input[value=error]").is_checked()
        page.keyboard.press("n")
        assert page.locator("input[value=none]").is_checked()
        page.keyboard.press("p")
        assert not page.locator("#predictions").is_checked()
        page.keyboard.press("+")
        page.wait_for_function("() => document.querySelector('#share-value').textContent == '25 %'")
        page.keyboard.press("Space")
        page.locator("#pause[aria-pressed=true]").wait_for()
        page.keyboard.press("Space")
        page.locator("#pause[aria-pressed=false]").wait_for()
        # Letters that are typed into a field stay there.
        page.focus("#source")
        page.keyboard.type("mer")
        assert page.input_value("#source") == "mer"
        assert page.locator("input[value=none]").is_checked()


def test_all_can_be_reached_by_tab_alone(visit):
    with serving("") as served:
        page = visit(served.url)
        plays(page)
        reached = set()
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate(
                    "() => { const at = document.activeElement;"
                    "return at.getAttribute('aria-label') || at.id || at.name || at.className; }"
                )
            )
        named = "pause reset preset overlay predictions share automatic source loop file skip"
        assert {*named.split(), "Reset made:", "Remove made:"} <= reached


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_fits_the_screen(visit, width, scheme):
    with serving("", "") as served:
        phone = {"viewport": {"width": width, "height": 700}, "color_scheme": scheme}
        page = visit(served.url, **phone, has_touch=width < 500)
        plays(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        small = page.evaluate(
            "[...document.querySelectorAll('button, select, .button, input[type=text]')]"
            ".filter((e) => e.offsetParent && e.getBoundingClientRect().height < 40)"
            ".map((e) => e.id)"
        )
        assert small == []
        assert contrast(page, "body") >= 7
        for part in ("#about", ".tile dt", ".badge", "button[type=submit]", "#kinds", "caption"):
            assert contrast(page, part) >= 4.5, part


def contrast(page, selector: str) -> float:
    """The contrast of a text with what is behind it (WCAG)."""
    fore, back = page.evaluate(
        "(selector) => { const start = document.querySelector(selector);"
        "let back = start; const of = (e) => getComputedStyle(e).backgroundColor;"
        "while (of(back) === 'rgba(0, 0, 0, 0)' && back.parentElement) back = back.parentElement;"
        "return [getComputedStyle(start).color, of(back)]; }",
        selector,
    )

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted((light(fore), light(back)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def test_a_screen_reader_gets_names_and_numbers(visit):
    with serving("", "part=0.3") as served:
        page = visit(served.url)
        plays(page)
        tree = page.locator("body").aria_snapshot()
        for line in (
            'heading "eventful live"',
            'button "Pause"',
            'slider "Budget: tokens computed in each frame"',
            'combobox "Preset"',
            'radio "computed tokens"',
            'img "made:, running',
            'img "Tokens computed: made:',
            'button "Remove made:"',
            'table "The last numbers of each stream"',
            'textbox "Source"',
        ):
            assert line in tree, line
        unnamed = re.findall(
            r"- (?:button|img|slider|textbox|checkbox|radio|combobox)\s*$", tree, re.M
        )
        assert unnamed == []
        served.worker.channels[1].feed.fail("The camera was unplugged.")
        page.wait_for_function(
            "() => document.querySelector('#announce').textContent.includes('dead')"
        )


@pytest.mark.slow
def test_reduced_motion_gets_a_picture_a_second(visit):
    with serving("rate=50") as served:
        page = visit(served.url, reduced_motion="reduce")
        plays(page)
        before, began = served.page.hub.delivered, time.monotonic()
        wait_for(lambda: served.page.hub.delivered >= before + 4)
        assert time.monotonic() - began > 2.9  # the first of them may have been due at once


def test_a_video_can_be_uploaded(visit, tmp_path):
    pytest.importorskip("av")
    path = videos.pan(tmp_path / "mine.mp4", 20, step=(1, 1))
    with serving(allowed=Allowed()) as served:
        page = visit(served.url)
        page.locator("#empty").wait_for()
        page.set_input_files("#file", path)
        plays(page, "s1")
        assert tile(page).locator("h3").inner_text() == "mine.mp4"


def test_a_page_with_a_token_opens_by_its_address(visit):
    with serving("", access=Access(token="a-token-of-some-length")) as served:
        page = visit(f"{served.url}?token=a-token-of-some-length")
        page.wait_for_url(served.url)
        plays(page)
        assert "token" not in page.evaluate("document.cookie")  # not for scripts
