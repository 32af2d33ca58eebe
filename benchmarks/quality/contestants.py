"""Who is compared: the peers, how each is installed, and what each is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "ciuic"
AUTOROUND_ITERATIONS = 200
"""AutoRound's own default; another number is said in the contestant's name."""


@dataclass(frozen=True)
class Peer:
    """A tool with an environment of its own. script: in peers/; install: arguments of `pip install`, step by
    step; build: whether the script has to build something there (`--build`)."""

    script: str
    install: tuple[tuple[str, ...], ...]
    build: bool = False


@dataclass(frozen=True)
class Contestant:
    """One row of the tables. tool: OURS or a key of PEERS; options: what it is asked for; curve: whether it is one of
    this tool's points, default effort, that peers' sizes are compared with."""

    name: str
    tool: str
    options: dict[str, Any] = field(default_factory=dict)
    curve: bool = False

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")


_TORCH = "torch==2.13.0"
_TRANSFORMERS = "transformers==5.23.0"
PEERS = {
    "llamacpp": Peer(
        "run_llamacpp.py",
        (
            (_TORCH, _TRANSFORMERS, "gguf==0.19.0", "accelerate==1.15.0"),
            ("sentencepiece==0.2.3", "protobuf==7.36.2"),
            ("scikit-build-core==1.1.2", "cmake==4.4.4", "ninja==1.13.2"),
        ),
        build=True,
    ),
    "bitsandbytes": Peer(
        "run_bitsandbytes.py", ((_TORCH, _TRANSFORMERS, "bitsandbytes==0.50.2", "accelerate==1.15.0"),)
    ),
    "hqq": Peer("run_hqq.py", ((_TORCH, _TRANSFORMERS, "hqq==0.2.8.post1"),)),
    # The last release that does not ask for a newer torch than the others run with.
    "gptqmodel": Peer(
        "run_gptqmodel.py",
        (
            ("setuptools==84.2.1", "wheel", _TORCH, _TRANSFORMERS),
            ("--no-build-isolation", "gptqmodel==7.6.0"),
        ),
    ),
    "autoround": Peer("run_autoround.py", ((_TORCH, _TRANSFORMERS, "auto-round==0.16.1"),)),
}

# Type, and the type of the token embedding where it is not the recipe's own. K and I types need 256 weights per row
# and give way to IQ4_NL, Q5_0 and the like where the width is no multiple, so sizes depend on the model.
_GGUF = (
    ("Q8_0", None),
    ("Q6_K", None),
    ("Q5_K_M", None),
    ("Q5_K_M", "q5_0"),
    ("Q4_K_M", None),
    ("Q4_K_M", "iq4_nl"),
    ("Q4_0", "q4_0"),
    ("IQ4_NL", "iq4_nl"),
    ("IQ4_XS", "iq4_nl"),
    ("Q3_K_M", "iq4_nl"),
    ("IQ3_M", "iq4_nl"),
    ("IQ3_S", "iq4_nl"),
    ("IQ2_M", "iq4_nl"),
)


def peers(autoround_iterations: int) -> list[Contestant]:
    """Every peer's contestants, each with the importance matrix or calibration its tool knows."""
    found = [
        Contestant(
            f"llama.cpp {name}" + (f", embedding {embedding.upper()}" if embedding else ""),
            "llamacpp",
            {"type": name, "embedding": embedding},
        )
        for name, embedding in _GGUF
    ]
    found.append(Contestant("bitsandbytes NF4, double quantization", "bitsandbytes", {"type": "nf4"}))
    for bits in (4, 3, 2):
        found.append(Contestant(f"HQQ {bits} bits", "hqq", {"bits": bits, "group": 64}))
    for bits in (4, 3):
        found.append(Contestant(f"GPTQModel {bits} bits", "gptqmodel", {"bits": bits, "group": 128}))
    steps = f", {autoround_iterations} iterations" if autoround_iterations != AUTOROUND_ITERATIONS else ""
    for bits in (4, 3, 2):
        found.append(
            Contestant(
                f"AutoRound {bits} bits{steps}",
                "autoround",
                {"bits": bits, "group": 128, "iterations": autoround_iterations},
            )
        )
    return found


def ours(bits: Sequence[float], best: Sequence[float] = ()) -> list[Contestant]:
    """This tool at several targets, otherwise as it comes; at those of `best` with all the effort it has."""
    found = [Contestant(f"ciuic {value:g}", OURS, {"bpw": value}, curve=True) for value in bits]
    effort = {"arguments": ["--effort", "best"]}
    return found + [Contestant(f"ciuic {value:g}, best", OURS, {"bpw": value, **effort}) for value in best]
