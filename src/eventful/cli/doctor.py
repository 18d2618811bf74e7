"""`eventful doctor`: what this machine has, what is missing, and how to install it."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

from eventful.cli import doctor_checks as checks
from eventful.extras import TABLE, install_line


def run(as_json: bool) -> int:
    """Print the report; the exit code is 1 if something is broken, not if it is merely absent."""
    report = collect()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 1 if report["problems"] else 0


def collect() -> dict[str, Any]:
    """The whole report as values for JSON, in the order it is printed."""
    from eventful import __version__

    extras, problems = checks.extras()
    torchvision = checks.torchvision_state()
    compiler, compiler_problems = checks.compiler()
    problems += checks.torchvision_problems(torchvision) + compiler_problems + checks.weights()
    backends = checks.backends()
    return {
        "eventful": __version__,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": checks.system(),
        "torch": checks.torch_build(),
        "libraries": {name: checks.version(name) for name in checks.CORE},
        "extras": extras,
        "torchvision": torchvision,
        "devices": checks.devices(),
        "backends": backends,
        "compiler": compiler,
        "video": checks.video(),
        "cache": checks.cache(),
        "missing": _missing(extras, backends),
        "problems": problems,
    }


def _missing(extras: dict[str, Any], backends: dict[str, bool]) -> list[dict[str, str]]:
    """What is absent, with the line that installs it."""
    found = [
        {"name": extra.name, "needed_for": extra.brings, "command": install_line(extra.name)}
        for extra in TABLE
        if not extras[extra.name]["installed"]
    ]
    if backends["cuda"] and not backends["triton"]:
        found.append(
            {"name": "triton", "needed_for": "fused GPU kernels", "command": "pip install triton"}
        )
    return found


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    python, system, built = report["python"], report["platform"], report["torch"]
    console.print(f"[bold]eventful[/] {report['eventful']}")
    console.print(
        f"python {python['version']} ({python['implementation']}), {python['executable']}"
    )
    console.print(f"{system['system']}, {system['cpu_count']} CPUs")
    console.print(f"torch {built['version']}, built for {built['build']}")
    for name in ("numpy", "safetensors"):
        console.print(f"{name} {report['libraries'][name] or '[red]missing[/]'}")
    for device in report["devices"]:
        console.print(_device_line(device), markup=False)
    usable = [name for name, there in report["backends"].items() if there]
    console.print(f"backends: {', '.join(usable) or 'none'}")
    console.print(f"C++ compiler, for torch.compile on a CPU: {report['compiler'] or 'none found'}")
    console.print(_video_line(report["video"]))
    console.print(_cache_line(report["cache"]), markup=False)
    if built["hint"]:
        console.print(f"[yellow]{built['hint']}[/]")
    if report["torchvision"] == "repaired":
        console.print(
            "[yellow]torchvision is repaired[/]: it imports, but its compiled operators (NMS, "
            "RoIAlign) do not load beside this torch. eventful does not need them; to have them, "
            "reinstall both from the same wheel index (docs/troubleshooting.md)"
        )
    _print_extras(console, report)
    _print_lists(console, report)


def _print_extras(console: Any, report: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("extra", "libraries", "needed by (used by)", box=None, pad_edge=False)
    for name, entry in report["extras"].items():
        libraries = [
            f"{library} {found}" if found else f"[yellow]{library} missing[/]"
            for library, found in entry["libraries"].items()
        ]
        used = f"({', '.join(entry['used_by'])})" if entry["used_by"] else ""
        commands = ", ".join(entry["needed_by"])
        table.add_row(name, ", ".join(libraries), f"{commands} {used}".strip())
    console.print()
    console.print(table)


def _print_lists(console: Any, report: dict[str, Any]) -> None:
    if report["missing"]:
        console.print("\nTo get what is missing (all optional):")
        for entry in report["missing"]:
            console.print(f"  {entry['needed_for']}: {entry['command']}", markup=False)
    if report["problems"]:
        console.print("\n[red]Broken:[/]")
        for entry in report["problems"]:
            console.print(f"  {entry['what']}\n    {entry['do']}", markup=False)
    else:
        console.print("\nNothing is broken.")


def _device_line(device: dict[str, Any]) -> str:
    parts = [device["name"], device["capability"]]
    parts += [flag for flag in ("avx512", "amx", "bf16") if device.get(flag)]
    if "threads" in device:
        parts.append(f"{device['threads']} threads, {device['attention']} attention")
    if "memory_bytes" in device:
        parts.append(f"{device['memory_bytes'] / 2**30:.0f} GiB")
    return f"{device['device']}: {', '.join(parts)}"


def _video_line(video: dict[str, Any] | None) -> str:
    if video is None:
        return "FFmpeg (PyAV): not installed"
    reads = [name for name, there in video["decoders"].items() if there]
    writes = [name for name, there in video["encoders"].items() if there]
    return (
        f"FFmpeg {video['ffmpeg']} (PyAV {video['pyav']}): reads {', '.join(reads) or 'nothing'}; "
        f"writes {', '.join(writes) or 'nothing'}"
    )


def _cache_line(cache: dict[str, Any]) -> str:
    state = f"{cache['bytes']} bytes" if cache["exists"] else "empty"
    if not cache["writable"]:
        state += "; it cannot be written, so times are measured anew in each process"
    return f"cache: {cache['folder']} ({state})"
