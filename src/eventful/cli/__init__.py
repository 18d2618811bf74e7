"""The `eventful` command.

This module holds the entry point alone; `eventful.cli.app`, which needs typer, has the commands.
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from typing import Any

from eventful.errors import EventfulError
from eventful.extras import install_line


def _show_warning(message: Warning | str, category: type[Warning], *where: Any) -> None:
    """The text of a warning of this package alone: where in the code it arose is of no use."""
    if category.__module__.partition(".")[0] == "eventful":
        print(message, file=sys.stderr)
    else:
        print(f"{category.__name__}: {message}", file=sys.stderr)


def main() -> None:
    """Run the command line; an error of the library ends it with its message and exit code 2."""
    missing = [library for library in ("typer", "rich") if find_spec(library) is None]
    if missing:
        print(
            f"The eventful command needs {' and '.join(missing)}, which is not installed.\n"
            f"Install it with: {install_line('cli')}",
            file=sys.stderr,
        )
        raise SystemExit(1)

    import typer

    from eventful.cli.app import app

    # `eventful doctor` reports it; other commands do not use these operators.
    warnings.filterwarnings("ignore", message="torchvision's compiled operators")
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        app(prog_name="eventful")
    except EventfulError as error:
        typer.secho(str(error), fg=typer.colors.RED, err=True)
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        typer.secho(
            "The memory does not suffice. Give a smaller --size, a smaller model, or fewer streams "
            f"and frames. ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            fg=typer.colors.RED,
            err=True,
        )
        raise SystemExit(2) from None


def _lacks_memory(error: BaseException) -> bool:
    """Whether memory could not be had; torch has no class of errors for that of a CPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in text for words in ("can't allocate memory", "not enough memory", "out of memory")
    )
