"""The report of a run: what it says, that it is one safe file, and that it stays small."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")

from eventful.errors import ConfigError
from eventful.pipeline.history import FrameRow, RunFacts, Still
from eventful.pipeline.report import write_report
from eventful.pipeline.report_charts import axis_top, thinned, ticks_of
from eventful.pipeline.report_elements import el, shown, shown_source
from eventful.pipeline.report_numbers import Numbers, factor, percent, plain, quantile, size

EVIL = "<script>alert(1)</script>"
QUOTE = 'x" onerror="alert(2)" y=\'z'
LOGIN = "rtsp://bob:s3cret@cam.local:554/stream"
VOID = {"meta", "input", "img", "br", "link"}


class Page(HTMLParser):
    """The elements of a page as (tag, attributes, text), and faults of its nesting."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[int] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.faults: list[str] = []
        self.feed(content)
        self.close()
        self.faults += [self.elements[place][0] for place in self.open]

    def handle_starttag(self, tag, attributes):
        if len(dict(attributes)) < len(attributes):
            self.faults.append(f"{tag} has an attribute twice")
        self.elements.append((tag, dict(attributes), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag):
        if not self.open or self.elements[self.open.pop()][0] != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        for place in self.open:
            self.elements[place][2].append(data)

    def all(self, tag: str, kind: str = "") -> list[tuple[dict[str, str | None], str]]:
        return [
            (attributes, "".join(text))
            for name, attributes, text in self.elements
            if name == tag and kind in ["", *(attributes.get("class") or "").split(" ")]
        ]

    def texts(self, tag: str, kind: str = "") -> list[str]:
        return [text.strip() for _, text in self.all(tag, kind)]

    @property
    def cards(self) -> dict[str, tuple[str, str]]:
        names = self.texts("dt")[-len(self.texts("dd", "number")) :]
        values = zip(self.texts("dd", "number"), self.texts("dd", "meaning"), strict=True)
        return dict(zip(names, values, strict=True))


def row(index: int = 0, source: str = "a.mp4", **more) -> FrameRow:
    given = {"ms": 10.0, "tokens": 100, "updated": 10.0, "operations": 2e9, "dense_operations": 8e9}
    return FrameRow(source, index, index / 25, **(given | more))


def full_rows(count: int, source: str = "a.mp4") -> list[FrameRow]:
    return [
        row(n, source, dense_ms=30.0 + n % 3, error=0.05, estimate=0.06, flushed=n % 9 == 0,
            stale=n % 7 == 6, found=n % 4)
        for n in range(count)
    ]  # fmt: skip


def still(index: int = 0, source: str = "a.mp4", height: int = 90, width: int = 160) -> Still:
    generator = torch.Generator().manual_seed(index)
    noise = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)
    return Still(source, index, noise, noise.flip(1), torch.rand(9, 16, generator=generator) > 0.8)


def page(tmp_path: Path, facts: RunFacts | None = None, rows=(), stills=()) -> Page:
    path = tmp_path / "report.html"
    write_report(path, facts or RunFacts("vit", ("a.mp4",)), rows, stills)
    made = Page(path.read_text(encoding="utf-8"))
    assert made.faults == []
    return made


class TestNumbers:
    def test_key_numbers(self):
        rows = [
            row(0, ms=40.0, updated=100.0, operations=8e9, dense_ms=30.0, error=0.0, flushed=True),
            row(1, ms=10.0, dense_ms=30.0, error=0.1),
            row(2, ms=10.0, dense_ms=None, error=None, stale=True),
            row(3, ms=10.0, dense_ms=50.0, error=0.3),
        ]
        made = Numbers.of(rows)
        assert made.saved == pytest.approx(32 / 14)
        assert made.speed_up == pytest.approx(30 / 10), "medians where both ran"
        assert made.share == pytest.approx(130 / 400)
        assert made.error == pytest.approx(0.1)
        assert made.error_high == pytest.approx(0.3)
        assert (made.frames, made.stale, made.flushed, made.compared) == (4, 1, 1, 3)

    def test_frames_without_dense_do_not_count_for_the_speed_up(self):
        rows = [row(n, ms=5.0) for n in range(10)] + [row(10, ms=20.0, dense_ms=40.0)]
        assert Numbers.of(rows).speed_up == pytest.approx(2)

    def test_nothing_is_known_of_no_frames(self):
        values = dataclasses.asdict(Numbers.of([])).items()
        assert {value for _, value in values} == {None, 0}

    def test_values_that_are_not_finite_and_zeros(self):
        nan, inf = float("nan"), float("inf")
        made = Numbers.of([row(0, error=nan, dense_ms=inf, operations=0.0, tokens=0, updated=0.0)])
        assert made.error is made.speed_up is made.saved is made.share is None

    def test_how_numbers_are_written(self):
        assert [factor(v) for v in (None, 0.876, 6.333, 12.34, 1234.5)] == [
            "–", "0.88x", "6.33x", "12.3x", "1,234x",
        ]  # fmt: skip
        assert [percent(v) for v in (None, 0.0312, 0.0999, 1.0)] == ["–", "3.1 %", "10 %", "100 %"]
        assert [plain(v, "ms") for v in (None, 0.0, 0.01234, 12.34, 12345.6)] == [
            "–", "0 ms", "0.0123 ms", "12.3 ms", "12,346 ms",
        ]  # fmt: skip
        assert [size(v) for v in (0, 999, 32_100_000, 2_300_000_000)] == [
            "0 bytes", "999 bytes", "32.1 MB", "2.3 GB",
        ]  # fmt: skip
        assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2


class TestContent:
    def test_the_cards(self, tmp_path):
        facts = RunFacts(
            "detector",
            ("a.mp4",),
            {"device": "cpu", "budget": "ErrorBudget(0.1)"},
            {"mAP50": {"eventful": 0.79, "dense": 0.812}},
            {"damaged": 1, "dropped": 3},
            32_100_000,
            {"eventful": "0.1.0", "device_name": "AMD EPYC"},
        )
        made = page(tmp_path, facts, full_rows(20))
        cards = made.cards
        assert cards["Operations saved"][0] == "4.00x"
        assert cards["Speed-up, measured"][0] == "3.10x"
        assert "20 frames" in cards["Speed-up, measured"][1]
        assert cards["Time of a step"][0] == "10 ms dense 31 ms"
        assert cards["Tokens updated"][0] == "10 %"
        assert cards["Median error"][0] == "0.05"
        assert cards["mAP50"][0] == "0.79 dense 0.812"
        assert cards["Frames"][0] == "20"
        assert cards["Lost frames"] == ("4", "Damaged, dropped or skipped: damaged 1, dropped 3.")
        assert cards["Memory of the streams"][0] == "32.1 MB"
        assert all(meaning.endswith(".") for _, meaning in cards.values())
        assert made.texts("h1") == ["detector"]
        head = "".join(made.texts("header"))
        assert "a.mp4" in head
        assert "cpu, AMD EPYC" in head
        assert "ErrorBudget(0.1)" in made.texts("td")

    def test_a_stream_that_is_slower_is_said_to_be(self, tmp_path):
        made = page(tmp_path, rows=[row(0, dense_ms=8.0)])
        value, meaning = made.cards["Speed-up, measured"]
        assert value == "0.80x"
        assert "slower" in meaning

    def test_without_dense_nothing_is_claimed(self, tmp_path):
        made = page(tmp_path, rows=[row(n) for n in range(9)])
        for name in ("Speed-up, measured", "Median error"):
            assert made.cards[name][0] == "not measured"
        titles = [text for _, text in made.all("strong")]
        assert titles == ["Tokens updated", "Time", "Operations"]
        assert "dense" not in made.texts("ul", "key")[1], "no line of times of the whole model"

    def test_four_charts_with_marks(self, tmp_path):
        made = page(tmp_path, rows=full_rows(30))
        assert [text for _, text in made.all("strong")] == [
            "Error", "Tokens updated", "Time", "Operations",
        ]  # fmt: skip
        assert len(made.all("path", "stale")) == 1
        assert len(made.all("path", "flush")) == 3
        labels = [attributes["aria-label"] for attributes, _ in made.all("div", "plot")]
        assert "measured: median 0.05" in labels[0]
        assert "4 stale frames" in labels[0]
        assert "4 flushes" in labels[2]
        assert "dense: median 31 ms, highest 32 ms (frame 2)" in labels[2]

    def test_one_frame_and_none(self, tmp_path):
        one = page(tmp_path, rows=full_rows(1))
        assert one.cards["Frames"][0] == "1"
        assert "NaN" not in "".join(one.texts("body"))
        none = page(tmp_path, RunFacts("vit", ()))
        assert none.cards["Frames"][0] == "0"
        assert "No frame was processed." in none.texts("p")
        assert none.all("svg") == []
        assert none.all("img") == []

    def test_sources_are_told_apart(self, tmp_path):
        facts = RunFacts("vit", ("a.mp4", "b.mp4", "silent"))
        slow = [dataclasses.replace(r, ms=20.0, dense_ms=90.0) for r in full_rows(12, "b.mp4")]
        made = page(tmp_path, facts, full_rows(20) + slow, [still(3, "b.mp4")])
        assert made.texts("option") == ["a.mp4", "b.mp4"]
        table = made.texts("div", "wide")[0]
        assert all(name in table for name in ("a.mp4", "b.mp4", "silent", "3.10x", "4.50x"))
        assert len(made.all("div", "source")) == 2
        tops = {attributes["data-top"] for attributes, _ in made.all("div", "plot")[2::4]}
        assert tops == {"100"}, "charts of both sources have the same axes"
        assert "b.mp4" in made.texts("article")[0]

    def test_the_table_of_a_run_has_all_frames(self, tmp_path):
        made = page(tmp_path, rows=full_rows(100))
        frames = [text.split(" to ") for text in made.texts("th") if " to " in text]
        assert [int(first) for first, _ in frames] == [0] + [
            int(last) + 1 for _, last in frames[:-1]
        ]
        assert frames[-1][1] == "99"

    def test_frames_whose_numbers_start_again(self, tmp_path):
        made = page(tmp_path, rows=full_rows(20) + full_rows(20))
        assert made.all("div", "plot")[0][0]["data-last"] == "39"

    def test_the_lines_of_the_documentation_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        page_of_docs = Path(__file__).parent.parent / "docs" / "report.md"
        code = "\n".join(re.findall(r"```python\n(.*?)```", page_of_docs.read_text(), re.DOTALL))
        exec(compile(code, str(page_of_docs), "exec"), {})
        assert "my detector" in (tmp_path / "report.html").read_text()


class TestStills:
    def test_three_pictures_each(self, tmp_path):
        made = page(tmp_path, rows=full_rows(3), stills=[still(0), still(2)])
        images = [attributes for attributes, _ in made.all("img")]
        assert len(images) == 6
        assert all(i["src"].startswith("data:image/webp;base64,") for i in images)
        assert all("of a.mp4" in i["alt"] for i in images)
        slider = made.all("input")[0][0]
        assert (slider["min"], slider["max"]) == ("1", "2")
        assert {"dense", "eventful"} <= set(made.texts("figcaption"))

    def test_what_is_not_known_is_left_out(self, tmp_path):
        bare = dataclasses.replace(still(), dense=None, updated=None)
        assert len(page(tmp_path, stills=[bare]).all("img")) == 1

    def test_many_stills_are_spread(self, tmp_path):
        made = page(tmp_path, stills=[still(n, height=9, width=16) for n in range(40)])
        names = made.texts("article")
        assert len(names) == 16
        assert names[0].startswith("Frame 0")
        assert names[-1].startswith("Frame 39")
        assert "16 of 40 stills." in "".join(made.texts("section", "stills"))

    def test_a_picture_in_another_form_is_refused(self, tmp_path):
        wrong = dataclasses.replace(still(), eventful=torch.rand(3, 9, 9))
        with pytest.raises(ConfigError, match=r"uint8"):
            page(tmp_path, stills=[wrong])
        assert list(tmp_path.iterdir()) == []

    def test_eight_large_stills_of_noise_stay_below_three_megabytes(self, tmp_path):
        page(
            tmp_path, rows=full_rows(8), stills=[still(n, height=360, width=640) for n in range(8)]
        )
        assert (tmp_path / "report.html").stat().st_size < 3_000_000


class TestSafety:
    def evil(self, tmp_path) -> Page:
        name = f"{EVIL} {QUOTE}"
        facts = RunFacts(
            name,
            (name, LOGIN),
            {name: name, "stream": f"from {LOGIN}, ftp://u:p@other/x"},
            {name: {"eventful": 0.5, name: 0.4}},
            {name: 2},
            versions={name: name},
        )
        rows = [*full_rows(5, name), *full_rows(4, LOGIN), *full_rows(2, "</title></style>&lt;")]
        return page(tmp_path, facts, rows, [still(1, name), still(2, LOGIN)])

    def test_names_are_shown_and_never_run(self, tmp_path):
        made = self.evil(tmp_path)
        assert made.texts("h1") == [f"{EVIL} {QUOTE}"]
        assert len(made.all("script")) == 1
        assert len(made.all("style")) == 1
        assert all("onerror" not in attributes for _, attributes, _ in made.elements)
        assert any(QUOTE in (attributes["alt"] or "") for attributes, _ in made.all("img"))
        assert EVIL not in (tmp_path / "report.html").read_text()
        assert made.texts("option")[-1] == "</title></style>&lt;"

    def test_credentials_are_nowhere(self, tmp_path):
        self.evil(tmp_path)
        text = (tmp_path / "report.html").read_text()
        assert "cam.local:554/stream" in text
        assert not re.search(r"s3cret|bob|u:p@", text)

    def test_nothing_is_fetched(self, tmp_path):
        made = self.evil(tmp_path)
        for _, attributes, _ in made.elements:
            for name in ("src", "href", "srcset", "action", "xlink:href"):
                assert (attributes.get(name) or "data:").startswith("data:")
        assert "url(" not in "".join(made.texts("style"))
        assert "@import" not in "".join(made.texts("style"))
        policy = next(a["content"] for a, _ in made.all("meta") if "http-equiv" in a)
        assert policy.startswith("default-src 'none'")
        assert "script-src 'sha256-" in policy
        assert "unsafe-inline'; script" in policy, "for styles alone"

    @pytest.mark.parametrize(
        "name", ["a\x00b\x1b[2J", "caf\udce9.mp4", "\u202egpj.exe", "日本.mp4"]
    )
    def test_odd_characters(self, tmp_path, name):
        made = page(tmp_path, RunFacts(name, (name,)), full_rows(2, name), [still(0, name)])
        assert not re.search(r"[\x00-\x08\x1b]", "".join(made.texts("body")))

    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("photos@2x/clip.mp4", "photos@2x/clip.mp4"),
            ("world:street?videos=8", "world:street?videos=8"),
            ("bob:pass@cam/stream", "cam/stream"),
            ("rtsp://bob:my pass@cam/stream", "rtsp://cam/stream"),
            ("http://cam/video?token=abc", "http://cam/video?..."),
        ],
    )
    def test_what_is_cut_from_a_source(self, text, wanted):
        assert shown_source(text) == wanted

    def test_every_address_in_a_text_is_cut(self):
        assert shown("rtsp://a:b@one/x and rtsp://c:d@two/y") == "rtsp://one/x and rtsp://two/y"

    def test_addresses_in_attributes_are_cut(self):
        assert (
            el("img", alt=f"frame of {LOGIN}").get("alt") == "frame of rtsp://cam.local:554/stream"
        )

    def test_two_logins_at_one_camera_stay_apart(self, tmp_path):
        names = ("rtsp://a:1@cam/x", "rtsp://b:2@cam/x")
        made = page(
            tmp_path, RunFacts("vit", names), [*full_rows(2, names[0]), *full_rows(2, names[1])]
        )
        assert made.texts("option") == ["rtsp://cam/x", "rtsp://cam/x (2)"]

    def test_a_file_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot be written"):
            write_report(tmp_path / "file" / "report.html", RunFacts("vit", ()), [], [])

    def test_the_script_and_data_are_no_json_of_names(self, tmp_path):
        """Names are texts of the page alone, so nothing has to be escaped for the script."""
        script = self.evil(tmp_path).texts("script")[0]
        assert "cam.local" not in script
        assert json.dumps(EVIL) not in script


class TestLongRuns:
    def test_twenty_thousand_frames(self, tmp_path):
        rows = full_rows(20_000)
        rows[12_345] = dataclasses.replace(rows[12_345], error=0.13)
        began = time.process_time()
        made = page(tmp_path, rows=rows)
        assert time.process_time() - began < 8
        assert (tmp_path / "report.html").stat().st_size < 300_000
        assert "highest 0.13 (frame 12,345)" in made.all("div", "plot")[0][0]["aria-label"]
        heights = [int(y) for y in re.findall(r"\d+ (\d+)", made.all("path", "line")[1][0]["d"])]
        assert min(heights) < 400, "a peak of one frame is drawn"

    def test_many_sources(self, tmp_path):
        names = tuple(f"camera {n}" for n in range(40))
        rows = [r for name in names for r in full_rows(150, name)]
        made = page(tmp_path, RunFacts("vit", names), rows)
        assert (tmp_path / "report.html").stat().st_size < 2_500_000
        assert len(made.texts("option")) == 32
        assert "8 more sources without charts: see the table." in made.texts("p")

    def test_thinning_keeps_the_lowest_and_the_highest(self):
        values = [float(n % 10) for n in range(1000)]
        values[503], values[777] = 99.0, -99.0
        kept = thinned(values, range(1000), 50)
        assert len(kept) <= 100
        assert (503, 99.0) in kept
        assert (777, -99.0) in kept
        assert kept == sorted(kept)

    def test_short_runs_are_not_thinned(self):
        values = [1.0, None, float("nan"), 2.0]
        assert thinned(values, range(4), 50) == [(0, 1.0), (3, 2.0)]

    def test_an_axis_shows_all_but_single_outliers(self):
        assert axis_top([1.0] * 30 + [50.0]) < 2
        assert axis_top([1.0] * 30 + [2.5]) == 3
        assert axis_top([1.0] * 100, [82.0] * 3) >= 82, "a line of few values is no outlier"
        assert axis_top([]) == axis_top([0.0, 0.0]) == axis_top([None]) == 1
        for top in (0.013, 1.0, 7.0, 99.0, 1234.0):
            ticks = ticks_of(axis_top([top]))
            assert 3 <= len(ticks) <= 8
            assert ticks[0] == 0
            assert ticks[-1] >= top * 0.999
