"""Where does `ciuic compress` need the most memory? The peak of each phase, and the code that ran at that moment.

    python benchmarks/phase_memory.py MODEL OUT [--effort fast] [--nsamples 8] [--seqlen 128]

Compresses in this process, while a thread reads the resident size every 10 ms. "after forward" is what follows the last
step of the bar "forward", until the next bar's first: the head's statistics. The functions are those of the thread that
compresses, which may be waiting for others.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

configure_numeric_libraries()

from ciuic_cli.compression.pipeline import compress  # noqa: E402
from ciuic_cli.process.memory import resident_bytes  # noqa: E402

SECONDS_BETWEEN = 0.01
STEP = 5_000_000
"""The functions are read where a peak is so many bytes above the last one with functions: reading them takes time."""
FUNCTIONS = 4
"""Innermost functions of the package that are shown."""


@dataclass
class Peak:
    """The most resident bytes of a phase; and of the last moment at which the functions were read: bytes, seconds."""

    resident: int
    noted: int = 0
    seconds: float = 0.0
    functions: list[str] = field(default_factory=list)


class Sampler:
    """Notes the peaks of the phases of the calling thread's work, in a thread of its own."""

    def __init__(self) -> None:
        self.peaks: dict[str, Peak] = {}
        self._started, self._phase = time.perf_counter(), "start"
        self._sampled = threading.get_ident()
        threading.Thread(target=self._sample, daemon=True).start()

    def progress(self, phase: str, done: int, total: int) -> None:
        """As `Progress`."""
        self._phase = f"after {phase}" if done == total else phase

    def _sample(self) -> None:
        while True:
            resident, phase = resident_bytes(), self._phase
            known = self.peaks.setdefault(phase, Peak(resident))
            known.resident = max(known.resident, resident)
            if resident >= known.noted + STEP:
                known.noted, known.seconds = resident, time.perf_counter() - self._started
                frames = traceback.extract_stack(sys._current_frames()[self._sampled])
                names = [f"{Path(f.filename).stem}.{f.name}" for f in frames if "ciuic_cli" in f.filename]
                known.functions = names[-FUNCTIONS:]
            time.sleep(SECONDS_BETWEEN)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--effort", default="fast")
    parser.add_argument("--nsamples", type=int)
    parser.add_argument("--seqlen", type=int)
    options = parser.parse_args()
    sampler = Sampler()
    compress(
        options.model, options.out, progress=sampler.progress,
        effort=options.effort, nsamples=options.nsamples, seqlen=options.seqlen,
    )  # fmt: skip
    for phase, peak in sampler.peaks.items():
        print(
            f"{phase:16} {peak.resident / 1e9:5.2f} GB at {peak.seconds:6.1f} s  {' > '.join(peak.functions)}"
        )


if __name__ == "__main__":
    main()
