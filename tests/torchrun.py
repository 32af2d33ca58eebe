"""Runs a script in several processes, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(worker: Path, size: int, *arguments: str) -> str:
    """What `worker` printed in `size` processes, one thread each; all of them must end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    found = subprocess.run(
        [*command, str(worker), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout
