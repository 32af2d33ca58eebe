"""This tool at one size with one idea switched off or changed at a time.

An option of the command is used where there is one; elsewhere a constant of a module takes another value (variant.py).
"""

from __future__ import annotations

from contestants import OURS, Contestant, ours

SWITCHED: dict[str, dict[str, list[str]]] = {
    "no pruning": {"arguments": ["--prune", "off"]},
    "no low-rank parts": {"arguments": ["--rank", "off"]},
    "neither": {"arguments": ["--prune", "off", "--rank", "off"]},
    "L = 12 trellis state bits": {"arguments": ["--effort", "fast"]},
    "feedback along inputs only": {"patches": ["ciuic_cli.statistics.recorder:FULL_FISHER_LIMIT=0"]},
    "H and G not shrunk": {"patches": ["ciuic_cli.statistics.sums:SEGMENTS=1"]},
    "H damped by 0.01": {"patches": ["ciuic_cli.passes.feedback:INPUT_DAMPING=0.01"]},
    "rows not sorted": {"patches": ["ciuic_cli.passes.row_sorting:CLASSES=1"]},
    "unevenness of rows ignored": {"patches": ["ciuic_cli.passes.effective_variance:POWER=1"]},
    "token weights not tempered": {"patches": ["ciuic_cli.allocation.matrices:TOKEN_WEIGHT_EXPONENT=1.0"]},
    "prediction not corrected by probes": {
        "patches": ["ciuic_cli.allocation.probes:CORRECTION_LIMITS=(1.0, 1.0)"]
    },
}
UNIFORM = {"arguments": ["--bits", "4", "--prune", "off", "--rank", "off"]}
UNIFORM_BITS = 4.1
"""The target of "4 bits everywhere": headers and row scales come on top of the 4. Tables show the real size."""


def variants(bpw: float) -> list[Contestant]:
    """This tool with default options, then every variant at the same target, then uniform bits if that is about 4."""
    found = ours([bpw])
    found += [
        Contestant(f"{found[0].name}, {name}", OURS, {"bpw": bpw, **switched})
        for name, switched in SWITCHED.items()
    ]
    if abs(bpw - 4) < 0.1:
        found.append(Contestant("ciuic, 4 bits everywhere", OURS, {"bpw": UNIFORM_BITS, **UNIFORM}))
    return found
