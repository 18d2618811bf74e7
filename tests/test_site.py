"""The documentation as a site: navigation, reference, commands, and a strict build."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

import eventful
from eventful.cli.app import app
from eventful.cli.groups import RunUnlessNamed
from pages import DOCS, PAGES, ROOT, Page

REFERENCE = sorted((DOCS / "reference").glob("*.md"))
_COPIED = "files/"  # files outside docs/ that the site copies: scripts/site_hooks.py


def settings() -> dict:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def entries(nav: list) -> list[str]:
    """The pages of a navigation, in order."""
    found: list[str] = []
    for entry in nav:
        inside = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += [inside] if isinstance(inside, str) else entries(inside)
    return found


def test_the_navigation_has_every_page_once():
    listed = entries(settings()["nav"])
    assert [page for page, count in Counter(listed).items() if count > 1] == []
    own = {page for page in listed if not page.startswith(_COPIED)}
    assert own == {str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md")}
    for page in set(listed) - own:
        assert (ROOT / page.removeprefix(_COPIED)).is_file(), page


def test_the_reference_has_every_public_name_once():
    shown = [
        name
        for page in REFERENCE
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert [name for name, count in Counter(shown).items() if count > 1] == []
    own = {name.removeprefix("eventful.") for name in shown if name.count(".") == 1}
    assert own - {"errors"} == set(eventful.__all__)
    for name in shown:
        module, _, member = name.rpartition(".")
        if module != "eventful":
            assert hasattr(importlib.import_module(module), member), name


def test_what_pages_import_is_in_the_reference():
    """A name that a page tells users to import is documented, or its whole module is."""
    shown = set(re.findall(r"^::: (\S+)$", "".join(p.read_text() for p in REFERENCE), re.MULTILINE))
    missing = set()
    for path in PAGES:
        for block in Page.read(path).blocks:
            if block.language == "python":
                for module, names in re.findall(
                    r"^ *from (eventful\S*) import ([^(#\n]+)", block.code, re.MULTILINE
                ):
                    for name in names.split(","):
                        full = f"{module}.{name.split()[0]}"
                        short = f"eventful.{name.split()[0]}"
                        inside = any(name.startswith(f"{full}.") for name in shown)
                        if not inside and not {full, short, module} & shown:
                            missing.add(f"{path.name}: {full}")
    assert not missing, "\n".join(sorted(missing))


def command_at(words: list[str]):
    """The command that words name, and the words that are left for it."""
    import typer

    command, rest = typer.main.get_command(app), words[1:]
    while hasattr(command, "commands") and rest:
        if rest[0] in command.commands:
            command, rest = command.commands[rest[0]], rest[1:]
        elif isinstance(command, RunUnlessNamed):
            command = command.commands["run"]
        else:
            break
    return command, rest


def options_of(command) -> set[str]:
    return {option for param in command.params for option in (*param.opts, *param.secondary_opts)}


def written(path: Path) -> list[list[str]]:
    """The words of every `eventful` command of a page, in blocks and in text."""
    text = path.read_text()
    found = [
        words
        for block in Page.read(path).blocks
        if block.language == "bash"
        for words in block.commands()
        if words[0] == "eventful"
    ]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for inline in re.findall(r"`(?:[A-Z_]+=\S+ )?(eventful [^`]+)`", prose):
        found.append(shlex.split(inline.replace("\n", " ")))
    return found


@pytest.mark.parametrize(
    "path", [p for p in PAGES if written(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_commands_exist_with_their_options(path):
    for words in written(path):
        command, rest = command_at(words)
        assert command.name not in (None, "eventful") or "--" in "".join(rest), shlex.join(words)
        named = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert named <= options_of(command) | {"--help"}, f"{shlex.join(words)}: {command.name}"


def test_a_wrong_option_is_found():
    command, _ = command_at(["eventful", "run", "detector", "--no-such-option"])
    assert command.name == "run"
    assert not {"--no-such-option"} <= options_of(command)


def test_other_commands_name_things_that_exist():
    """`make TARGET`, `python FILE`, `python -m MODULE`, `pip install ...[extras]`."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(declared["optional-dependencies"])
    seen = Counter()
    for path in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = path.read_text()
        for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE):
            assert set(filter(None, target)) <= targets, (path.name, target)
            seen["make"] += 1
        for module in re.findall(r"python -m (benchmarks[\w.]*)", text):
            assert importlib.util.find_spec(module), (path.name, module)
            seen["module"] += 1
        for file in re.findall(r"python ((?:benchmarks|examples|tests)/[\w/]+\.py)", text):
            assert (ROOT / file).exists(), (path.name, file)
            seen["file"] += 1
        for names in re.findall(r"eventful-transformers\[([\w,]+)\]", text):
            assert set(names.split(",")) <= extras, (path.name, names)
            seen["extras"] += 1
    assert min(seen[kind] for kind in ("make", "module", "file", "extras")) > 2


def test_blocks_that_are_not_run_say_why():
    """They are few, and each needs something that tests do not have; `-s` lists them."""
    left = [block for path in PAGES for block in Page.read(path).blocks if block.not_run]
    print(f"\n{len(left)} blocks of the documentation are not run:")
    for block in left:
        print(f"  {block.place}: {block.not_run}")
    needs = r"needs|installs|trains|takes|measures|large models"
    assert [block.place for block in left if not re.match(needs, block.not_run)] == []
    assert len(left) <= 27


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    pytest.importorskip("mkdocstrings", reason="`make docs` installs it")
    pytest.importorskip("material", reason="`make docs` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        text = page.read_text()
        loaded = [
            *re.findall(r"<(?:script|img|iframe|source|video)\b[^>]*?src=\"?([^\"> ]+)", text),
            *re.findall(r"<link\b[^>]*?href=\"?([^\"> ]+)", text),
            *re.findall(r"url\(['\"]?([^)'\"]+)", text),
        ]
        assert [link for link in loaded if re.match(r"(?:https?:)?//", link)] == [], page.name
        assert 'class="mermaid"' not in text  # the theme would load its script from a server
        assert "<!-- test:" not in text
    for style in tmp_path.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)[^;)]*//", style.read_text()) == [], style.name
    names = (tmp_path / "reference").glob("*.html")
    shown = "".join(page.read_text() for page in names)
    assert [name for name in eventful.__all__ if f'id="eventful.{name}"' not in shown] == []
