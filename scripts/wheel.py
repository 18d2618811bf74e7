"""Builds the wheel and the source distribution, and tries the wheel in a new environment.

    python scripts/wheel.py [--out dist] [--extra demo] [--demo]

The environment is made in a temporary folder and removed. Versions are those of constraints.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Build, install, check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the results")
    parser.add_argument("--extra", default="demo", help="extras to install, with commas")
    parser.add_argument("--demo", action="store_true", help="run a short demo as well")
    options = parser.parse_args()
    wheel = build(options.out.resolve())
    with tempfile.TemporaryDirectory(prefix="eventful-wheel-") as folder:
        python = install(wheel, Path(folder) / "venv", options.extra)
        # From another folder, where nothing of the checkout can be imported.
        run(python, "-I", ROOT / "tests" / "smoke.py", cwd=folder)
        if options.demo:
            run(python.with_name("eventful"), "demo", "--frames", "6", cwd=folder)
    print(f"{wheel} works in a new environment")


def build(out: Path) -> Path:
    """The wheel, made from the source distribution, with the pinned backend of this environment."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=ROOT)
    return max(out.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def install(wheel: Path, folder: Path, extra: str) -> Path:
    """A new environment with the wheel and an extra in it; its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    run(*pip, "-c", ROOT / "constraints.txt", f"{wheel}[{extra}]", cwd=folder)
    return python


def run(*command: object, cwd: object) -> None:
    """Run a command and stop where it fails."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    if subprocess.run(words, cwd=str(cwd), check=False).returncode:
        raise SystemExit(f"{' '.join(words)} failed")


if __name__ == "__main__":
    main()
