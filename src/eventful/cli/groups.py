"""Groups of commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class RunUnlessNamed(TyperGroup):
    """A group that runs its command `run` when no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `run` if the first word is not a command."""
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["run", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed
