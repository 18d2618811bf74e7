"""Elements of an HTML page. Every text is escaped when the page is written, and credentials go."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias
from xml.etree import ElementTree

from eventful.video.address import without_credentials

Element: TypeAlias = ElementTree.Element
Child: TypeAlias = "str | Element | Iterable[Child] | None"

# A browser shows nothing sensible for these, and some end a text.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_LOGIN = re.compile(r"[^\s/:@]+:[^\s@]*@")  # user:password@


def el(tag: str, *children: Child, **attributes: str | bool | None) -> Element:
    """An element.

    Args:
        children: texts and elements, in order; None is left out.
        attributes: `class_` is written as class, `aria_label` as aria-label; None and False are
            left out, True is an attribute without a value.
    """
    made = ElementTree.Element(tag)
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        text = "" if value is True else value
        # A picture as base64 holds no address, and is long.
        clean = text if text.startswith("data:") else shown(text)
        made.set(name.rstrip("_").replace("_", "-"), clean)
    add(made, *children)
    return made


def add(parent: Element, *children: Child) -> None:
    """Append texts and elements to an element."""
    for child in children:
        if child is None:
            continue
        if isinstance(child, ElementTree.Element):
            parent.append(child)
        elif isinstance(child, str):
            text = shown(child)
            if len(parent):
                parent[-1].tail = (parent[-1].tail or "") + text
            else:
                parent.text = (parent.text or "") + text
        else:
            add(parent, *child)


def code(tag: str, text: str, **attributes: str) -> Element:
    """A `style` or `script` of our own, which is written as it is."""
    if f"</{tag}" in text.lower():
        raise ValueError(f"a {tag} cannot hold its own end")
    made = el(tag, **attributes)
    made.text = text
    return made


def shown(text: str) -> str:
    """A text as it may be shown: no control characters, and addresses without credentials."""
    text = _CONTROL.sub("\ufffd", text)
    if "://" not in text and not _LOGIN.search(text):
        return text
    return re.sub(r"[^\s,;]+", _without_credentials, text)


def _without_credentials(word: re.Match[str]) -> str:
    text = word.group()
    return without_credentials(text) if "://" in text or _LOGIN.search(text) else text


def shown_source(name: str) -> str:
    """The name of a source, which is one address as a whole, spaces included."""
    address = "://" in name or _LOGIN.search(name)
    return shown(without_credentials(name) if address else name)


def page_text(root: Element) -> bytes:
    """A page as bytes. Names of files may hold bytes that are no text; they become '?'."""
    body = ElementTree.tostring(root, encoding="unicode", method="html")
    return f"<!doctype html>\n{body}\n".encode("utf-8", "replace")
