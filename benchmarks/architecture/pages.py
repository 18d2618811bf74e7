"""The tables of docs/architecture.md."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.architecture import tracing
from benchmarks.architecture.tracing import Call
from tests import test_house as house

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "architecture.md"
WAYS = ("host", "device")
BELOW = {"ops", "tokens", "memory", "cost", "policies", "config"}  # not drawn in the trees

# Calls from a lower layer into a higher one: caller, callee (a prefix of its file), and why.
CALLBACKS = (
    (
        "rules",
        "surgery/adapters/",
        "`BlockSpec.qkv`, `.project`, `.mlp` and the norms: functions of the model's block, put "
        "into the `BlockSpec` by the adapter. `rules` calls them and does not know the model.",
    ),
    (
        "rules",
        "engine/shaped.py",
        "`GateInputs.entering` and `.gated`: the first gate begins, and its report is complete. On "
        "a device the engine then starts sending the report to the host, or ends one CUDA graph "
        "and begins the next.",
    ),
    (
        "surgery",
        "engine/graphs.py",
        "`Step.track`: takes over the blocks of a model whose other code cannot be recorded. They "
        "are recorded or replayed.",
    ),
)


def layer_of() -> dict[str, int]:
    """The layer of each package, counted from the bottom."""
    return {name: level for name, level in house.FLOOR_OF.items() if name != "_moved"}


def imports() -> dict[str, Counter[str]]:
    """By package, how many import statements of it name each other package."""
    tree = house.House.read(house.SOURCE)
    found: dict[str, Counter[str]] = {name: Counter() for name in layer_of()}
    for module in tree.files:
        package = house.room(module)
        targets = {(one.line, house.room(target)) for target, one in tree.inner_imports(module)}
        for _, target in targets:
            if package in found and target in found and target != package:
                found[package][target] += 1
    return found


def purpose(package: str) -> str:
    """The first line of a package's docstring."""
    single = house.SOURCE / f"{package}.py"
    source = single if single.exists() else house.SOURCE / package / "__init__.py"
    return (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]


def packages_table() -> str:
    """Every package with its layer, what it is for and what it imports, from the top."""
    layers, found = layer_of(), imports()
    lines = ["| layer | package | what it is for | may import | imports |", "|--:|---|---|---|---|"]
    for name in sorted(layers, key=lambda name: (-layers[name], name)):
        layer = layers[name] + 1
        kind = f"`{name}`" if (house.SOURCE / f"{name}.py").exists() else f"`{name}/`"
        used = sorted(found[name], key=lambda other: (-layers[other], other))
        listed = ", ".join(f"`{other}`" for other in used) or "-"
        allowed = f"1 to {layer}" if layer > 1 else "1"
        lines.append(f"| {layer} | {kind} | {purpose(name)} | {allowed} | {listed} |")
    return "\n".join(lines)


def unexpected(calls: Sequence[Call]) -> list[str]:
    """Calls upward that `CALLBACKS` does not list."""
    allowed = {(caller, file) for caller, file, _ in CALLBACKS}
    return [
        f"{call.caller.file} {call.caller.function} calls {call.file} {call.function}"
        for call in tracing.upward(calls, house.FLOOR_OF)
        if call.caller is not None
        and not any(
            call.caller.package == caller and call.file.startswith(file) for caller, file in allowed
        )
    ]


def upward_table(traces: dict[str, list[Call]]) -> str:
    """The calls upward that are allowed, with their number in each trace."""
    lines = ["| from | to | host | device | what is called |", "|---|---|--:|--:|---|"]
    for caller, file, why in CALLBACKS:
        counts = [
            sum(
                call.caller is not None
                and call.caller.package == caller
                and call.file.startswith(file)
                for call in tracing.upward(traces[way], house.FLOOR_OF)
            )
            for way in WAYS
        ]
        lines.append(f"| `{caller}` | `{file}` | {counts[0]} | {counts[1]} | {why} |")
    return "\n".join(lines)


def numbers_table(traces: dict[str, list[Call]]) -> str:
    """Calls of each package, and between files and packages."""
    counts = {way: Counter(call.package for call in traces[way]) for way in WAYS}
    lines = ["| calls of functions in | host | device |", "|---|--:|--:|"]
    for name in lanes(traces):
        lines.append(f"| `{name}` | {counts['host'][name]} | {counts['device'][name]} |")
    totals = {
        "all": len,
        "calls into another file": tracing.file_changes,
        "calls into another package": tracing.package_changes,
        "calls into a higher layer": lambda calls: len(tracing.upward(calls, house.FLOOR_OF)),
    }
    for label, count in totals.items():
        lines.append(f"| {label} | {count(traces['host'])} | {count(traces['device'])} |")
    return "\n".join(lines)


def lanes(traces: dict[str, list[Call]]) -> list[str]:
    """Packages that were called, from the top layer to the bottom."""
    called = {call.package for calls in traces.values() for call in calls}
    return sorted(called, key=lambda name: (-house.FLOOR_OF[name], name))


def tree(calls: Sequence[Call]) -> str:
    """The calls as text, to be unfolded."""
    lines = "\n".join(tracing.folded(calls, BELOW))
    return (
        f"<details>\n<summary>The same as a tree</summary>\n\n```text\n{lines}\n```\n\n</details>"
    )
