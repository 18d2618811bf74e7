"""Links and words of the documentation; the README is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import PAGES, ROOT

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


def anchors(page: Path) -> set[str]:
    """What `#...` may follow a link to a page: its headings, as GitHub writes them.

    A page of the reference also has the names that it shows.
    """
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    shown = re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    return {word.replace(" ", "-") for word in words} | set(shown)


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


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
