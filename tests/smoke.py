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

    model = eventful.load("detector")
    assert set(shipped.SHIPPED) <= {
        file.stem for file in shipped.weights_of("detector").parent.iterdir()
    }
    stream = eventful.Stream(eventful.convert(model))
    updated = []
    for pixels in World(3, frames=4, exposures=1).read(range(4)):
        frame, placement = model.prepare(pixels)
        with torch.no_grad():
            (found,) = stream(frame, [placement])
        assert torch.isfinite(found.boxes).all()
        updated.append(stream.last.updated["frame"])
    assert len(found) > 0, "the detector found nothing"
    assert updated[0] == max(updated) > min(updated[1:]), updated
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
