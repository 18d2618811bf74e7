"""Lines of the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

TYPE = "text/plain; version=0.0.4; charset=utf-8"


def head(prefix: str, name: str, kind: str, about: str) -> Iterator[str]:
    """The two lines ahead of a metric."""
    yield f"# HELP {prefix}_{name} {about}"
    yield f"# TYPE {prefix}_{name} {kind}"


def labels(**values: str) -> str:
    """Labels, as they stand in braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def number(value: float) -> str:
    """A value."""
    return (
        str(value) if isinstance(value, int) else f"{value:.6g}" if value < 1e6 else f"{value:.0f}"
    )


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
