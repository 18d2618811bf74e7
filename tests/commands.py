"""The `eventful` command inside the test's own process."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

from eventful.cli import main


@pytest.fixture
def here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command without a process of its own, which would load torch and libraries anew."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["eventful", *words])
        with pytest.raises(SystemExit) as end, warnings.catch_warnings():
            main()
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(words, end.value.code or 0, out, err)

    return run
