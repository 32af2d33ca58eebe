"""`ciuic` whose effort "best" has few states and recovery steps; test_workers.py starts it under torchrun."""

from __future__ import annotations

from ciuic_cli.__main__ import main
from ciuic_cli.compression import options

SHORT = options.Effort(states=1 << 12, nsamples=6, probed_layers=16, recovery_steps=4)

if __name__ == "__main__":
    options.EFFORTS["best"] = SHORT
    main()
