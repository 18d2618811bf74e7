"""Checks an installed package by itself: `python tests/smoke.py`, with nothing but an extra `cli`.

Run it with the interpreter of the environment to check, from any folder. It must not import from
the checkout, so it refuses to.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

import eventful
from eventful.models import shipped

CHECKOUT = Path(__file__).resolve().parent.parent


def installed() -> None:
    """The package is the installed one, whole, and of the version that its metadata says."""
    from importlib import metadata

    here = Path(eventful.__file__).resolve()
    assert CHECKOUT / "src" not in here.parents, f"{here} is the checkout, not an installation"
    assert metadata.version("eventful-transformers") == eventful.__version__
    assert (here.parent / "py.typed").is_file()
    for name in eventful.__all__:
        assert getattr(eventful, name) is not None


def streams() -> None:
    """The detector of the package follows a few frames of the generated world."""
    from eventful.video.world import World

    folder = shipped.weights_of("detector").parent
    assert {f"{name}.safetensors" for name in shipped.SHIPPED} <= {f.name for f in folder.iterdir()}
    model = eventful.load("detector")
    # Whether a step runs dense would depend on how busy the machine is.
    stream = eventful.Stream(eventful.convert(model, eventful.Config.fast(fallback=False)))
    operations = []
    for pixels in World(3, frames=4, exposures=1).read(range(4)):
        frame, placement = model.prepare(pixels)
        with torch.no_grad():
            (found,) = stream(frame, [placement])
        assert torch.isfinite(found.boxes).all()
        operations.append(stream.last.macs)
    assert len(found) > 0, "the detector found nothing"
    assert 0 < max(operations[1:]) < operations[0], operations
    print(stream.summary())


def commands() -> None:
    """The command answers, and finds nothing broken."""
    done = subprocess.run(
        [Path(sys.executable).with_name("eventful"), "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["eventful"] == eventful.__version__
    assert report["problems"] == []


if __name__ == "__main__":
    for check in (installed, streams, commands):
        check()
        print(f"{check.__name__}: ok")
