"""Optional libraries: found, missing, and torchvision beside a torch it was not built for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eventful.errors import MissingDependencyError
from eventful.surgery import libraries

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
    with pytest.raises(ValueError, match="EXTRAS"):
        libraries.load("no_such_library")


@pytest.mark.usefixtures("no_torchvision")
def test_working_torchvision_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_at(tmp_path, has_ops=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "_define_schemas", lambda: pytest.fail("touched torchvision"))
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


def test_mismatched_torchvision_is_repaired_with_one_warning(tmp_path: Path) -> None:
    """In its own process: operator schemas cannot be taken back."""
    torchvision_at(tmp_path, has_ops=False, body=NEEDS_NMS)
    # The user's own import comes first and fails half way, as it would before meeting eventful.
    script = f"""
import sys, warnings
sys.path.insert(0, {str(tmp_path)!r})
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_timm_loads_beside_the_installed_torchvision() -> None:
    assert libraries.load("timm.layers").PatchEmbed
