"""Peak memory of `ciuic merge` by each method, and of a process that merges nothing.

    python benchmarks/merging.py ARTIFACT ADAPTER TRAIN.jsonl [--methods low-rank bf16 requantize]

Every merge is a process of its own. Its peak is the kernel's: the largest resident set of the process. The first row
is a process that imports the same libraries and opens the artifact.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

NOTHING = """
import sys
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.train.merging.merge import merge
from transformers import AutoModelForCausalLM
open_artifact(sys.argv[1])
"""


def peak(command: list[str]) -> tuple[float, float]:
    """(largest resident set in bytes, seconds) of a command, which must succeed."""
    started = time.monotonic()
    pid = os.posix_spawn(command[0], command, os.environ)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_maxrss * 1024, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    parser.add_argument("adapter")
    parser.add_argument("train_file")
    parser.add_argument("--methods", nargs="+", default=["low-rank", "bf16", "requantize"])
    options = parser.parse_args()
    stored = sum(file.stat().st_size for file in Path(options.artifact).glob("*.safetensors"))
    nothing, seconds = peak([sys.executable, "-c", NOTHING, options.artifact])
    rows = [("no merge", nothing, seconds)]
    for method in options.methods:
        with tempfile.TemporaryDirectory(prefix="merging-") as folder:
            out = Path(folder) / "out"
            words = ["merge", options.artifact, options.adapter, str(out), "--train-file", options.train_file]
            rows.append(
                (
                    method,
                    *peak([sys.executable, "-m", "ciuic_cli", *words, "--method", method, "--device", "cpu"]),
                )
            )
            shutil.rmtree(out)
    print(f"artifact: {stored / 1e6:.1f} MB")
    print("| method | peak, MB | above a process that merges nothing, MB | over the artifact | s |")
    print("|---|---|---|---|---|")
    for method, found, seconds in rows:
        above = found - nothing
        print(f"| {method} | {found / 1e6:.0f} | {above / 1e6:.0f} | {above / stored:.2f} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
