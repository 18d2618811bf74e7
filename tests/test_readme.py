"""The README's lines run as they stand, on smaller frames; links and words of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import videos

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted([README, *ROOT.glob("docs/**/*.md")])

# Words of ours, or figures of speech, that a reader cannot look up.
UNUSUAL = (
    "house",
    "floors?(?!\\()",
    "rooms?",
    "doors?",
    "wings?",
    "census",
    "lodged?",
    "tenan(?:ts?|cy)",
    "residences?",
    "dials?",
    "told",
)


def test_the_ten_lines_run(capsys, tmp_path, monkeypatch):
    pytest.importorskip("av")
    videos.pan(tmp_path / "street.mp4", 8, step=(2, 2))
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    assert "518" in code
    exec(compile(code.replace("518", "70"), str(README), "exec"), {})
    shown = capsys.readouterr().out
    assert shown.startswith("8 frames: ")
    assert "of the operations saved" in shown


def test_the_lines_about_budgets_run(capsys, tmp_path, monkeypatch):
    pytest.importorskip("av")
    videos.pan(tmp_path / "street.mp4", 8, step=(2, 2))
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "budgets.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    assert "518" in code
    exec(compile(code.replace("518", "70"), str(page), "exec"), {})
    assert "asked 0.1 error" in capsys.readouterr().out


def test_the_lines_about_many_streams_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "many-streams.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    assert "518" in code
    exec(compile(code.replace("518", "70"), str(page), "exec"), {})
    shown = capsys.readouterr().out
    expected = re.findall(r"print\(.*\)  # ([(\[].*)$", code, re.MULTILINE)
    assert len(expected) >= 4
    assert [line for line in expected if line not in shown] == []
    assert "no output for ('gate',)" in shown
    assert "MB" in shown  # the stream that does not fit
    assert "frames: " in shown


def test_the_lines_about_a_model_of_your_own_run(capsys):
    page = ROOT / "docs" / "adapters.md"
    code = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL).group(1)
    found: dict[str, object] = {"__name__": "page"}
    exec(compile(code.replace("224", "64"), str(page), "exec"), found)
    assert "4 of 4 blocks can be made eventful (structure)" in capsys.readouterr().out
    assert found["tokens"].shape == (1, 17, 64)


def anchors(page: Path) -> set[str]:
    """What `#...` may follow a link to a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_words_are_usual(page):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(rf"\b(?:{'|'.join(UNUSUAL)})\b.*", prose, re.IGNORECASE) == []


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [page.name for page in ROOT.glob("docs/*.md") if page.name != "index.md"]
    assert [name for name in pages if f"({name})" not in index] == []
