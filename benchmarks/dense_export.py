"""Peak memory of `ciuic export --to bf16`, and the KL divergence of its result from the artifact.

    python benchmarks/dense_export.py out/ --text samples/text/heldout.txt --limit 4

The export runs in a process of its own. Its peak is compared with what the process takes when everything is imported
and the artifact's headers are read. The KL is computed in float32 on a CPU.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.evaluation.perplexity import evaluate

EXPORT = """
import resource, sys
import ciuic_cli
from ciuic_cli.artifact.model import meta_model
from ciuic_cli.artifact.reader import open_artifact
from ciuic_cli.codecs import native

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

native.interface()
export = ciuic_cli.export_dense
meta_model(open_artifact(sys.argv[1]))
before = peak()
export(sys.argv[1], sys.argv[2])
print(before, peak())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--text", type=Path, help="default: the package's own text")
    parser.add_argument("--limit", type=int, default=4, help="windows of 1,024 tokens")
    options = parser.parse_args()
    largest = max(2 * math.prod(blob.shape) for blob in open_artifact(options.artifact).blobs.values())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "dense"
        command = [sys.executable, "-c", EXPORT, str(options.artifact), str(out)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        before, peak = map(int, printed.split())
        print(
            f"the program {before / 1e6:.0f} MB, at the peak {(peak - before) / 1e6:.1f} MB more: "
            f"{(peak - before) / largest:.2f} times the largest tensor ({largest / 1e6:.1f} MB in bf16)"
        )
        found = evaluate(out, base=options.artifact, text=options.text, limit=options.limit, device="cpu")
        print(
            f"KL to the artifact {found['kl_mean']:.3g} ± {found['kl_stderr']:.1g} ({found['tokens']} tokens)"
        )


if __name__ == "__main__":
    main()
