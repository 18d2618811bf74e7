"""Makes faults, the soak and the scaling table, and stores what happened.

python -m benchmarks.cluster                    # all of them: half an hour
python -m benchmarks.cluster workers disk soak
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks.cluster.faults import FAULTS
from benchmarks.cluster.page import RESULTS, write_page
from benchmarks.cluster.soak import LONG
from eventful import files
from eventful.bench.results import origin

RUNS = {**FAULTS, **LONG}


def main(names: list[str]) -> None:
    """Run some of them."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"cluster-{name}-") as folder:
            before = os.getloadavg()[0]
            found = RUNS[name](Path(folder))
        found = {"run": name, "about": RUNS[name].__doc__, **found}
        # Other work on the machine makes everything slower: 2 is what two cores can do.
        found["load_average"] = [round(before, 1), round(os.getloadavg()[0], 1)]
        found["origin"] = {**origin("cpu"), "ray": version("ray"), "cores": os.cpu_count()}
        files.write_json(RESULTS / f"{name}.json", found)
        left_out = ("origin", "kills", "about", "samples")
        print(name, {key: value for key, value in found.items() if key not in left_out})
        write_page()


if __name__ == "__main__":
    main(sys.argv[1:] or list(RUNS))
