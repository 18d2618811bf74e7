"""Hooks of `mkdocs.yml`: links of pages to files of the repository outside docs/.

On GitHub and in an editor, a link such as `../benchmarks/results/demo.json` leads to the file. The
site has only docs/, so each file that a page links to is copied into the site under `files/`, and
the link is rewritten. A Markdown file becomes a page, and its own links are treated the same way.
`--strict` then checks these links like any other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OTHERS = "files"  # the folder of the site for files outside docs/
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)]*)?(\))")
_FOR_TESTS = re.compile(r"^<!-- (?:test|not run|slow)\b.*?-->\n+", re.MULTILINE | re.DOTALL)


def in_repository(src_uri: str) -> PurePosixPath:
    """Where the source of a page of the site is in the repository."""
    path = PurePosixPath(src_uri)
    if path.parts[0] == OTHERS:
        return path.relative_to(OTHERS)
    return PurePosixPath("docs") / path


def in_site(path: PurePosixPath) -> str:
    """Where a file of the repository is in the site."""
    if path.parts[0] == "docs":
        return path.relative_to("docs").as_posix()
    return (OTHERS / path).as_posix()


def target(page: PurePosixPath, link: str) -> PurePosixPath | None:
    """The file of the repository that a link of a page leads to; None for an address."""
    if ":" in link or link.startswith("/"):
        return None
    return PurePosixPath(os.path.normpath(page.parent / link))


def outside_code(text: str, change: Any) -> str:
    """The text, with its parts that are not code changed."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def linked(page: PurePosixPath) -> Iterator[PurePosixPath]:
    """Files outside docs/ that a page links to."""
    for match in _LINK.finditer(_CODE.sub("", (ROOT / page).read_text())):
        path = target(page, match[2])
        if path and path.parts[0] != "docs" and (ROOT / path).is_file():
            yield path


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    pages = [in_repository(file.src_uri) for file in files.documentation_pages()]
    added: set[PurePosixPath] = set()
    while pages:
        for path in linked(pages.pop()):
            if path in added:
                continue
            added.add(path)
            files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
            if path.suffix == ".md":
                pages.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links, and leave out comments that are for the tests of the pages."""
    here = page.file.src_uri
    source = in_repository(here)

    def link(match: re.Match[str]) -> str:
        path = target(source, match[2])
        if path is None:
            return match[0]
        inside = os.path.relpath(in_site(path), PurePosixPath(here).parent)
        return f"{match[1]}{inside}{match[3] or ''}{match[4]}"

    return outside_code(_FOR_TESTS.sub("", markdown), lambda text: _LINK.sub(link, text))
