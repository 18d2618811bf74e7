"""Makes faults, the soak or the scaling table, and stores what happened.

python -m benchmarks.cluster workers registry driver hang disk camera rolling every readers
"""

from __future__ import annotations

import os
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
            before = os.getloadavg()[0]
            found = FAULTS[name](Path(folder))
        found = {"run": name, "about": FAULTS[name].__doc__, **found}
        # Other work on the machine makes everything slower: 2 is what two cores can do.
        found["load_average"] = [round(before, 1), round(os.getloadavg()[0], 1)]
        found["origin"] = {**origin("cpu"), "ray": version("ray"), "cores": os.cpu_count()}
        files.write_json(RESULTS / f"{name}.json", found)
        print(name, {k: v for k, v in found.items() if k not in ("origin", "kills", "about")})


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAULTS))
