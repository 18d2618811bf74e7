"""Optional libraries: found, missing, and torchvision beside a torch it was not built for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import eventful
from eventful.errors import MissingDependencyError
from eventful.surgery import libraries, torchvision_repair

# Stands in for torchvision: `extension` says whether the compiled operators loaded, and like the
# real package it registers a fake for nms whatever the answer.
EXTENSION = "def _has_ops():\n    return {has_ops}\n"
NEEDS_NMS = 'import torch\ntorch.library.register_fake("torchvision::nms", lambda *args: None)\n'


def torchvision_at(root: Path, *, has_ops: bool, body: str = "") -> None:
    package = root / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(f"from . import extension\n{body}")
    (package / "extension.py").write_text(EXTENSION.format(has_ops=has_ops))


@pytest.fixture
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", ["timm", "transformers", "av", "matplotlib"])
def test_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError) as caught:
        libraries.load(name)
    assert f"eventful-transformers[{libraries.EXTRAS[name]}]" in str(caught.value)


def test_missing_submodule_is_a_version_problem() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(MissingDependencyError, match="pip install --upgrade matplotlib"):
        libraries.load("matplotlib.no_such_module")


def test_missing_requirement_of_a_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "av.py").write_text("import no_such_requirement")
    monkeypatch.delitem(sys.modules, "av", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError, match="needs no_such_requirement"):
        libraries.load("av")


def test_unknown_library_is_refused() -> None:
    with pytest.raises(ValueError, match=r"extras\.TABLE"):
        libraries.load("no_such_library")


@pytest.mark.usefixtures("no_torchvision")
def test_working_torchvision_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_at(tmp_path, has_ops=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        torchvision_repair, "_define_schemas", lambda: pytest.fail("touched torchvision")
    )
    assert libraries.repair_torchvision() == "ok"
    assert libraries.repair_torchvision() == "ok"


@pytest.mark.usefixtures("no_torchvision")
def test_other_failures_of_torchvision_are_left_to_its_importer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchvision_at(tmp_path, has_ops=False, body="raise RuntimeError('something else')")
    monkeypatch.syspath_prepend(tmp_path)
    assert libraries.repair_torchvision() == "broken"
    with pytest.raises(RuntimeError, match="something else"):
        libraries.load("torchvision")


@pytest.mark.usefixtures("no_torchvision")
def test_absent_torchvision_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert libraries.repair_torchvision() == "missing"


def run(script: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """In its own process: operator schemas cannot be taken back."""
    start = f"import sys\nsys.path[:0] = {[str(path) for path in paths]!r}\n"
    return subprocess.run([sys.executable, "-c", start + script], capture_output=True, text=True)


def test_mismatched_torchvision_is_repaired_with_one_warning(tmp_path: Path) -> None:
    torchvision_at(tmp_path, has_ops=False, body=NEEDS_NMS)
    # The user's own import comes first and fails half way, as it would before meeting eventful.
    script = """
import warnings
try:
    import torchvision
except RuntimeError as error:
    assert "torchvision::nms does not exist" in str(error)
else:
    raise AssertionError("the stand-in should not import unaided")
from eventful.surgery import libraries
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert [libraries.repair_torchvision() for _ in range(3)] == ["repaired"] * 3
    assert libraries.load("torchvision").extension
[warning] = [w for w in caught if w.category is libraries.TorchvisionMismatchWarning]
assert "reinstall" in str(warning.message)
"""
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr


def test_import_eventful_repairs_torchvision_when_it_is_imported(tmp_path: Path) -> None:
    torchvision_at(tmp_path, has_ops=False, body=NEEDS_NMS)
    (tmp_path / "uses_it.py").write_text("import torchvision")
    script = """
import eventful
assert "torch" not in sys.modules and "torchvision" not in sys.modules
import uses_it
assert uses_it.torchvision.extension._has_ops() is False
assert type(uses_it.torchvision.__spec__.loader).__module__.endswith("_external")
"""
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("TorchvisionMismatchWarning") == 1


def test_a_torchvision_that_imports_is_not_run_twice(tmp_path: Path) -> None:
    torchvision_at(tmp_path, has_ops=True, body="print('runs')")
    script = "import eventful, torchvision\nassert 'torch' not in sys.modules"
    done = run(script, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs\n", "")


def test_an_error_in_torchvision_reaches_the_one_who_imports_it(tmp_path: Path) -> None:
    torchvision_at(tmp_path, has_ops=False, body="raise RuntimeError('something else')")
    done = run("import eventful, torchvision", tmp_path)
    assert done.returncode == 1
    assert "something else" in done.stderr


def test_timm_imports_after_eventful_beside_the_installed_torchvision() -> None:
    pytest.importorskip("timm")
    alone, after = run("import timm"), run("import eventful\nimport timm\nprint(timm.__name__)")
    if alone.returncode:  # as where torchvision's wheel is for CUDA and torch is for CPUs
        assert "torchvision::nms does not exist" in alone.stderr
    assert after.returncode == 0, after.stderr
    assert after.stdout == "timm\n"
    assert after.stderr.count("TorchvisionMismatchWarning") == bool(alone.returncode)


def test_timm_loads_beside_the_installed_torchvision() -> None:
    assert libraries.load("timm.layers").PatchEmbed


_CTRL_C = """
import gc, signal, torch
from eventful.bench import dense
example = torch.rand(1, 4)
specs = [dense.DenseSpec(torch.nn.Linear(4, 4).eval(), example) for _ in range(2)]
runs = [dense._openvino(spec, "f32") for spec in specs]
while runs:
    runs.pop(0)(example)
    gc.collect()
signal.signal(signal.SIGINT, lambda *_: print("handled", flush=True))
signal.raise_signal(signal.SIGINT)
"""


def test_a_signal_after_openvino_was_used_reaches_its_handler():
    """Cores of OpenVINO that end in the order of their beginning leave a stack that is gone."""
    pytest.importorskip("openvino")
    done = subprocess.run(
        [sys.executable, "-c", _CTRL_C], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_there_is_one_core_of_openvino():
    source = Path(eventful.__file__).parent
    uses = [path.name for path in source.rglob("*.py") if re.search(r"\.Core\(", path.read_text())]
    assert uses == ["libraries.py"]
