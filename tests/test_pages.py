"""Every command and snippet of the documentation runs, on smaller frames; see `pages.py`."""

from __future__ import annotations

import logging
import re
import tomllib
from unittest.mock import patch

import pytest
import torch

from eventful.policies import registry
from eventful.surgery import adapters
from pages import PAGES, ROOT, Page, run

READ = [Page.read(path) for path in PAGES]
LANGUAGES = {"python", "bash", "toml", "text"}

# What a page prints besides the comments behind its own `print`.
SHOWN = {
    "README.md": ("of the operations saved",),
    "adapters.md": (),
    "budgets.md": ("asked 0.1 error",),
    "convert.md": ("4 of 4 blocks can be made eventful (structure)", "8 frames: "),
    "detections.md": ("of the tokens, [", "asked 0.1 error"),
    "many-streams.md": ("no output for ('gate',)", "MB", "frames: "),
    "start.md": ("3 frames: ", "flushed, 1024 of 1024 tokens"),
}


def name_of(page: Page) -> str:
    return str(page.path.relative_to(ROOT)).removeprefix("docs/")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to run in. What pages register or configure is undone."""
    pytest.importorskip("av")
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(adapters, "_ADAPTERS", list(adapters._ADAPTERS))
    logger, root = logging.getLogger("eventful"), logging.getLogger()
    level, handlers = logger.level, list(root.handlers)
    torch.manual_seed(0)
    with patch.dict(registry._REGISTRY):
        yield tmp_path
    logger.setLevel(level)
    root.handlers[:] = handlers


def check(page: Page, shown: str, *, slow: bool) -> None:
    """What a page printed is what it says."""
    code = "".join(b.code for b in page.blocks if not b.not_run and (slow or not b.slow))
    expected = re.findall(r"^ *print\(.*\)  # ([(\[].*)$", code, re.MULTILINE)
    wanted = (*expected, *SHOWN.get(name_of(page), ()))
    assert [line for line in wanted if line not in shown] == []


@pytest.mark.parametrize("page", [p for p in READ if p.has(slow=False)], ids=name_of)
def test_a_page_runs(page, place, capsys):
    run(page, place, slow=False)
    check(page, capsys.readouterr().out, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in READ if p.has(slow=True)], ids=name_of)
def test_a_page_runs_with_its_slow_parts(page, place, capsys):
    run(page, place, slow=True)
    check(page, capsys.readouterr().out, slow=True)


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_every_block_has_a_language_and_parses(page):
    for block in page.blocks:
        assert block.language in LANGUAGES, block.place
        if block.language == "python":
            compile(block.code, block.place, "exec")
        elif block.language == "toml":
            tomllib.loads(block.code)
        elif block.language == "bash":
            assert list(block.commands()), block.place
