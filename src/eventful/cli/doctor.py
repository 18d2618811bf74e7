"""`eventful doctor`: what this machine has, what is missing, and how to install it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import warnings
from importlib import metadata
from typing import Any

# Distribution name -> what it is needed for.
LIBRARIES = {
    "torch": "everything",
    "numpy": "everything",
    "safetensors": "snapshots",
    "timm": "timm models",
    "transformers": "Hugging Face models",
    "torchvision": "image transforms and detection operators",
    "av": "reading and writing video",
    "matplotlib": "plots",
    "supervision": "boxes on the video of a run",
    "trackers": "tracking detections",
    "pyarrow": "results as Parquet",
    "triton": "fused GPU kernels",
    "onnxruntime": "running exported models",
}


def run(as_json: bool) -> None:
    """Print the report."""
    report = collect()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)


def collect() -> dict[str, Any]:
    """The whole report as values for JSON, in the order it is printed."""
    libraries = {name: version(name) for name in LIBRARIES}
    usable = backends()
    return {
        "eventful": version("eventful-transformers"),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "cpu_count": os.cpu_count(),
        },
        "libraries": libraries,
        "torchvision": torchvision_state(),
        "devices": devices(),
        "backends": usable,
        "compiler": shutil.which(os.environ.get("CXX", "c++")),
        "missing": [
            {"name": name, "needed_for": LIBRARIES[name], "command": _command(name)}
            for name, found in libraries.items()
            # Without a CUDA device triton is not needed.
            if found is None and (name != "triton" or usable["cuda"])
        ],
    }


def version(distribution: str) -> str | None:
    """Installed version, read from metadata so that nothing is imported; None if absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torchvision_state() -> str:
    """`ok`, `repaired`, `broken` or `missing`: see `eventful.surgery.libraries`."""
    from eventful.surgery.libraries import repair_torchvision

    with warnings.catch_warnings():
        # The report has the same information as the warning.
        warnings.simplefilter("ignore")
        return repair_torchvision()


def devices() -> list[dict[str, Any]]:
    """The CPU and every CUDA device, with what decides their speed."""
    import torch

    features = _cpu_features()
    found: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": features.get("cpu_name") or platform.processor() or platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "avx512": bool(features.get("avx512_f")),
            "bf16": bool(features.get("avx512_bf16") or features.get("amx_bf16")),
            "amx": bool(features.get("amx_tile")),
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


def backends() -> dict[str, bool]:
    """What this torch was built with and can use here."""
    import torch

    return {
        "cuda": torch.cuda.is_available(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "openmp": torch.backends.openmp.is_available(),
        "triton": version("triton") is not None and torch.cuda.is_available(),
    }


def _cpu_features() -> dict[str, Any]:
    """Instruction sets by name; older versions of torch and some platforms lack this call."""
    import torch

    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return dict(capabilities()) if capabilities is not None else {}


def _command(name: str) -> str:
    from eventful.surgery.libraries import EXTRAS, install_command

    return install_command(name) if name in EXTRAS else f"pip install {name}"


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    python, system = report["python"], report["platform"]
    console.print(f"[bold]eventful[/] {report['eventful'] or 'not installed, run from source'}")
    console.print(
        f"python {python['version']} ({python['implementation']}), {python['executable']}"
    )
    console.print(f"{system['system']}, {system['cpu_count']} CPUs")
    console.print(f"C++ compiler: {report['compiler'] or 'none found'}\n")

    table = Table("library", "version", "for", box=None, pad_edge=False)
    for name, found in report["libraries"].items():
        table.add_row(name, found or "[yellow]missing[/]", LIBRARIES[name])
    console.print(table)
    if report["torchvision"] in {"repaired", "broken"}:
        console.print(
            f"\n[yellow]torchvision is {report['torchvision']}[/]: its compiled operators do not "
            "load beside this torch; reinstall both from the same wheel index "
            "(docs/troubleshooting.md)"
        )

    console.print()
    for device in report["devices"]:
        console.print(_device_line(device))
    usable = [name for name, there in report["backends"].items() if there]
    console.print(f"backends: {', '.join(usable) or 'none'}")

    if report["missing"]:
        console.print("\nTo get what is missing (all optional):")
        for entry in report["missing"]:
            console.print(f"  {entry['needed_for']}: {entry['command']}", markup=False)


def _device_line(device: dict[str, Any]) -> str:
    parts = [device["name"], device["capability"]]
    parts += [flag for flag in ("avx512", "amx", "bf16") if device.get(flag)]
    if "threads" in device:
        parts.append(f"{device['threads']} threads")
    if "memory_bytes" in device:
        parts.append(f"{device['memory_bytes'] / 2**30:.0f} GiB")
    return f"{device['device']}: {', '.join(parts)}"
