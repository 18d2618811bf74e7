"""Makes faults, the soak or the scaling table, and stores what happened.

python -m benchmarks.cluster workers registry driver hang disk camera rolling every readers
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks.cluster.faults import FAULTS
from eventful import files
from eventful.bench.results import origin

RESULTS = Path(__file__).resolve().parent.parent / "results" / "cluster"


def main(names: list[str]) -> None:
    """Run some of them."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"cluster-{name}-") as folder:
            found = FAULTS[name](Path(folder))
        found = {"run": name, "about": FAULTS[name].__doc__, **found}
        found["origin"] = {**origin("cpu"), "ray": version("ray")}
        files.write_json(RESULTS / f"{name}.json", found)
        print(name, {k: v for k, v in found.items() if k not in ("origin", "kills", "about")})


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAULTS))
