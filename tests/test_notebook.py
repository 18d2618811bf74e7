"""The notebook of examples/ runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "eventful.ipynb"


def code_cells(notebook: Path) -> list[dict]:
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_is_stored_without_outputs():
    cells = code_cells(NOTEBOOK)
    assert len(cells) >= 5
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"]] == []
    for cell in cells:
        compile("".join(cell["source"]), cell["id"], "exec")


def test_the_slider_has_a_plain_loop_beside_it():
    last = "".join(code_cells(NOTEBOOK)[-1]["source"])
    assert "from ipywidgets import" in last
    assert "except ImportError:" in last


@pytest.mark.slow
@pytest.mark.parametrize("widgets", [True, False], ids=["slider", "loop"])
def test_it_runs_from_top_to_bottom(widgets, tmp_path, monkeypatch):
    for library in ("nbconvert", "ipykernel", "matplotlib"):
        pytest.importorskip(library, reason="`make docs` installs it")
    if widgets:
        pytest.importorskip("ipywidgets", reason="`make docs` installs it")
    else:
        hidden = tmp_path / "hidden" / "ipywidgets"
        hidden.mkdir(parents=True)
        (hidden / "__init__.py").write_text("raise ImportError('not installed')")
        monkeypatch.setenv("PYTHONPATH", str(hidden.parent), prepend=":")
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "notebook", str(NOTEBOOK)]
    done = subprocess.run(
        [*command, "--output-dir", str(tmp_path), "--output", "done.ipynb"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    outputs = [output for cell in code_cells(tmp_path / "done.ipynb") for output in cell["outputs"]]
    shown = "".join("".join(output.get("text", "")) for output in outputs)
    assert "16 frames: " in shown
    assert "of the operations saved" in shown
    pictures = [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= (2 if widgets else 5)
    assert all(len(base64.b64decode(picture)) > 5000 for picture in pictures)
    sliders = [
        o for o in outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})
    ]
    assert bool(sliders) == widgets
