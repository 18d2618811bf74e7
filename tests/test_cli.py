"""The command line: fast to answer, typed in its output, and clear when something is missing."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from commands import here  # noqa: F401
from eventful import __version__
from eventful.cli import main
from eventful.errors import EventfulError

BEFORE_MAIN = "import sys; sys.argv = ['eventful', *{arguments!r}]\n"
RUN_MAIN = "from eventful.cli import main\n"


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def eventful(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user runs it."""
    command = [sys.executable, "-m", "eventful.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_help_lists_every_command_without_loading_torch() -> None:
    script = BEFORE_MAIN.format(arguments=["--help"]) + RUN_MAIN
    script += (
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = python(script)
    assert done.returncode == 0, done.stderr
    for command in (
        "inspect", "demo", "reproduce", "weights", "doctor", "evaluate", "visualize", "train",
        "calibrate", "run",
    ):  # fmt: skip
        assert command in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["inspect"],
        ["demo"],
        ["doctor"],
        ["reproduce", "counts"],
        ["reproduce", "memory"],
        ["weights", "convert"],
        ["evaluate", "vitdet"],
        ["evaluate", "vivit"],
        ["evaluate", "run"],
        ["bench", "video"],
        ["calibrate"],
        ["run"],
        ["visualize"],
        ["train", "vitdet"],
        ["train", "vivit"],
    ],
)
def test_every_command_has_help(command: list[str], here) -> None:
    done = here(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_help_costs_less_than_a_second() -> None:
    """Of processor time: a busy machine makes everything slow, a heavy import makes help slow."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    assert eventful("--help").returncode == 0
    assert spent() - before < 1.0


def test_unknown_command_fails() -> None:
    done = eventful("no-such-command")
    assert done.returncode != 0
    assert "no-such-command" in done.stderr


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_missing_cli_extra_says_how_to_get_it(library: str) -> None:
    script = BEFORE_MAIN.format(arguments=["--help"])
    script += f"sys.modules[{library!r}] = None\n" + RUN_MAIN + "main()"
    done = python(script)
    assert done.returncode == 1
    assert 'pip install "eventful-transformers[cli]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_of_the_library_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(as_json: bool) -> None:
        raise EventfulError("what to do next")

    monkeypatch.setattr("eventful.cli.doctor.run", fail)
    monkeypatch.setattr(sys, "argv", ["eventful", "doctor"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "what to do next" in capsys.readouterr().err


def test_inspect_reports_blocks_tokens_and_state() -> None:
    done = eventful(
        "inspect",
        "timm:vit_base_patch16_224",
        "--size",
        "1024",
        "--dtype",
        "bfloat16",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["matched"] == len(report["blocks"]) == 12
    assert report["tokens"] == 4097
    assert set(report["state_bytes"]) == {"fast", "exact", "paper", "tokenwise", "stgt"}
    assert report["state_bytes"]["fast"] <= 205e6
    assert "torchvision" not in done.stderr


def test_inspect_takes_a_transformers_config(tmp_path, here) -> None:
    config = {"model_type": "dinov2", "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for name in (str(path), str(tmp_path)):
        done = here("inspect", f"hf:{name}", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["matched"], report["tokens"], report["size"]) == (2, 17, [56, 56])


@pytest.mark.parametrize(
    "name", ["vit_base_patch17_224", "timm:vit_of_dreams", "hf:no/such/config", "torch:vit"]
)
def test_inspect_says_what_a_model_name_should_be(name: str, here) -> None:
    done = here("inspect", name)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr) > 20


def test_inspect_of_something_else_finds_nothing(here) -> None:
    done = here("inspect", "timm:resnet18", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["matched"] == 0


def test_reproduce_counts_prints_every_row(here) -> None:
    done = here("reproduce", "counts", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    keys = {"table", "variant", "size", "r", "unit", "paper", "ours", "relative_difference"}
    assert all(keys <= set(row) for row in rows)
    assert len(rows) > 60
    worst = max(abs(row["relative_difference"]) for row in rows if row["ours"] is not None)
    assert worst < 0.005


def test_version() -> None:
    script = "import sys; sys.argv[1:] = ['--version']; from eventful.cli import main; main()"
    assert python(script).stdout.strip() == f"eventful {__version__}"
