"""Two processes on this machine, as `torchrun` starts them."""

from __future__ import annotations

import os
import subprocess
import sys


def pair(*arguments: object) -> str:
    """What a module (`-m NAME ...`) or a script prints, run as two processes that must succeed.

    The agent asks the system for a free port and the processes meet on the loopback address: a
    port made from a process number may be in use, and a host name may resolve late on a busy
    machine.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "--local-addr", "localhost"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *(str(argument) for argument in arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,  # three processes that load torch, on a machine that may be busy
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
