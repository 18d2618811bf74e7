"""`eventful doctor`: what it reports, and what counts as broken."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from commands import here  # noqa: F401
from eventful import __version__
from eventful.cli import doctor, doctor_checks
from eventful.errors import CheckpointError
from eventful.extras import TABLE
from eventful.models import shipped


@pytest.fixture(scope="module")
def report() -> dict:
    """The report of this machine, as it is written to JSON."""
    return json.loads(json.dumps(doctor.collect()))


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch):
    """Takes distributions for not installed."""
    real = doctor_checks.version

    def hide(*names: str) -> None:
        monkeypatch.setattr(
            doctor_checks, "version", lambda name: None if name in names else real(name)
        )

    # Libraries are imported in other tests; here only what is absent matters.
    monkeypatch.setattr(doctor_checks, "import_problem", lambda *_: None)
    return hide


def test_it_reports_every_field(report: dict) -> None:
    assert list(report) == [
        *("eventful", "python", "platform", "torch", "libraries", "extras", "torchvision"),
        *("devices", "backends", "compiler", "video", "cache", "missing", "problems"),
    ]
    assert report["eventful"] == __version__
    assert report["python"]["version"].startswith(f"{sys.version_info.major}.")
    assert report["platform"]["cpu_count"] >= 1
    assert report["torch"]["build"].split()[0] in {"CPU", "CUDA", "ROCm"}
    assert report["libraries"]["torch"]
    assert report["torchvision"] in {"ok", "repaired", "missing"}
    assert report["problems"] == []


def test_ray_can_be_started_here_after_a_report() -> None:
    """Ray reads its settings when it is first imported, and the report imports it."""
    pytest.importorskip("ray")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    code = (
        "from eventful.cli import doctor; doctor.collect()\n"
        "from eventful.remote.session import ray_session\n"
        "with ray_session(cpus=1) as ray: print(ray.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.stdout.split() == ["True"], done.stderr


def test_it_describes_the_cpu_first(report: dict) -> None:
    cpu = report["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["capability"]
    assert {type(cpu[flag]) for flag in ("avx512", "bf16", "amx")} == {bool}
    assert cpu["attention"] in {"fused", "products"}


def test_it_has_every_extra_and_what_needs_it(report: dict) -> None:
    assert list(report["extras"]) == [extra.name for extra in TABLE]
    assert report["extras"]["video"]["needed_by"].count("visualize") == 1
    assert report["extras"]["cli"]["installed"]
    absent = {name for name, entry in report["extras"].items() if not entry["installed"]}
    assert {entry["name"] for entry in report["missing"]} - {"triton"} == absent


def test_codecs_and_cache(report: dict, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    if report["video"] is not None:
        assert report["video"]["decoders"]["h264"] is True
    monkeypatch.setenv("EVENTFUL_CACHE", str(tmp_path / "new" / "folder"))
    found = doctor_checks.cache()
    assert (found["folder"], found["exists"]) == (str(tmp_path / "new" / "folder"), False)
    assert found["writable"]
    (tmp_path / "new").write_text("a file where the folder should be")
    assert not doctor_checks.cache()["writable"]


def test_an_unknown_codec_is_not_there() -> None:
    av = pytest.importorskip("av")
    assert doctor_checks._codec(av, "no-such-codec", "r") is False


@pytest.mark.parametrize("extra", TABLE, ids=lambda extra: extra.name)
def test_an_absent_extra_is_no_problem_and_has_its_line(extra, absent, here) -> None:
    absent(*extra.libraries.values())
    done = here("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    [entry] = [entry for entry in report["missing"] if entry["name"] == extra.name]
    assert entry["command"] == f'pip install "eventful-transformers[{extra.name}]"'
    assert report["extras"][extra.name]["installed"] is False


def test_triton_is_missed_on_a_gpu_only() -> None:
    extras = {extra.name: {"installed": True} for extra in TABLE}
    assert doctor._missing(extras, {"cuda": False, "triton": False}) == []
    [entry] = doctor._missing(extras, {"cuda": True, "triton": False})
    assert entry["command"] == "pip install triton"


def broken_torchvision(monkeypatch, tmp_path) -> str:
    monkeypatch.setattr(doctor_checks, "torchvision_state", lambda: "broken")
    return "torchvision is installed and does not import"


def broken_library(monkeypatch, tmp_path) -> str:
    (tmp_path / "openvino.py").write_text("raise ImportError('libX.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "openvino", raising=False)
    real = doctor_checks.version
    monkeypatch.setattr(doctor_checks, "version", lambda n: "1" if n == "openvino" else real(n))
    return "openvino is installed and does not import"


def broken_compiler(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    return "no-such-compiler does not run"


def failing_compiler(monkeypatch, tmp_path) -> str:
    (tmp_path / "cc").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CXX", f"{tmp_path / 'cc'} -flag")
    return "exit status 3"


def lost_weights(monkeypatch, tmp_path) -> str:
    def lost(name: str) -> None:
        raise CheckpointError("The weights are not in this installation")

    monkeypatch.setattr(shipped, "weights_of", lost)
    return "The weights are not in this installation"


@pytest.mark.parametrize(
    "breakage",
    [broken_torchvision, broken_library, broken_compiler, failing_compiler, lost_weights],
)
def test_what_is_broken_gives_1_and_says_what_to_do(breakage, monkeypatch, tmp_path, here) -> None:
    what = breakage(monkeypatch, tmp_path)
    done = here("doctor")
    assert done.returncode == 1
    shown = " ".join(done.stdout.split())
    assert what in shown
    assert "Nothing is broken" not in shown
    [problem] = {entry["what"]: entry for entry in doctor.collect()["problems"]}.values()
    assert problem["do"] in shown


def test_the_text(here) -> None:
    done = here("doctor")
    assert done.returncode == 0, done.stderr
    for words in ("cpu:", "C++ compiler", "torch ", "cache:", "FFmpeg", "Nothing is broken."):
        assert words in done.stdout
    for extra in TABLE:
        assert f"\n{extra.name} " in done.stdout


def test_a_cpu_build_beside_an_nvidia_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "install a CUDA build" in doctor_checks.torch_build()["hint"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor_checks.torch_build()["build"] == "CUDA 13.0"
    assert "no CUDA device" in doctor_checks.torch_build()["hint"]
