"""What each idea is worth: this tool at one size with one thing switched off or changed at a time.

Where the command has an option, the option is used; elsewhere a documented constant of a module takes another value
(see variant.py).
"""

from __future__ import annotations

from contestants import OURS, Contestant, ours

SWITCHED: dict[str, dict[str, list[str]]] = {
    "no pruning": {"arguments": ["--prune", "off"]},
    "no low-rank parts": {"arguments": ["--rank", "off"]},
    "neither": {"arguments": ["--prune", "off", "--rank", "off"]},
    "trellis window of 12 bits": {"arguments": ["--effort", "fast"]},
    "rounding fed back along inputs only": {"patches": ["ciuic_cli.passes.quantize:OUTPUT_SHRINKAGE=1.0"]},
    "output curvature not shrunk": {"patches": ["ciuic_cli.passes.quantize:OUTPUT_SHRINKAGE=0.0"]},
    "input curvature damped by 0.01": {"patches": ["ciuic_cli.passes.quantize:INPUT_DAMPING=0.01"]},
    "rows stored as they come": {"patches": ["ciuic_cli.passes.sort:CLASSES=1"]},
    "rows taken for even": {"patches": ["ciuic_cli.passes.unevenness:POWER=1"]},
    "importance of tokens not tempered": {"patches": ["ciuic_cli.allocation.matrices:TEMPER=1.0"]},
    "tokens of a sequence independent": {"patches": ["ciuic_cli.statistics.moments:MEETING=0.0"]},
    "prediction not corrected by measurement": {"patches": ["ciuic_cli.allocation.probes:LIMITS=(1.0, 1.0)"]},
}
UNIFORM = {"arguments": ["--bits", "4", "--prune", "off", "--rank", "off"]}
UNIFORM_BITS = 4.1
"""The target of "4 bits everywhere": headers and row scales come on top of the 4; its real size is shown."""


def variants(bpw: float) -> list[Contestant]:
    """This tool as it comes, first, and every variant at the same target; uniform bits where that is about 4."""
    found = ours([bpw])
    found += [
        Contestant(f"{found[0].name}, {name}", OURS, {"bpw": bpw, **switched})
        for name, switched in SWITCHED.items()
    ]
    if abs(bpw - 4) < 0.1:
        found.append(Contestant("ciuic, 4 bits everywhere", OURS, {"bpw": UNIFORM_BITS, **UNIFORM}))
    return found
