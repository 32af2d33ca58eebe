"""The contestants: `ciuic` and its peers, how each peer is installed, and with which options each one runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "ciuic"
AUTOROUND_ITERATIONS = 200
"""AutoRound's own default. The contestant's name shows any other number."""


@dataclass(frozen=True)
class Peer:
    """A tool with an environment of its own. script: its file in peers/; install: arguments of `pip install`, one tuple
    per call; build: the script must be called with `--build` once after installation."""

    script: str
    install: tuple[tuple[str, ...], ...]
    build: bool = False


@dataclass(frozen=True)
class Contestant:
    """One row of the tables. tool: OURS or a key of PEERS; options: passed to the tool; curve: a point of this
    tool with default effort, from which the bits for a peer's KL are interpolated."""

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
    # The last release that works with the same torch as the others.
    "gptqmodel": Peer(
        "run_gptqmodel.py",
        (
            ("setuptools==84.2.1", "wheel", _TORCH, _TRANSFORMERS),
            ("--no-build-isolation", "gptqmodel==7.6.0"),
        ),
    ),
    "autoround": Peer("run_autoround.py", ((_TORCH, _TRANSFORMERS, "auto-round==0.16.1"),)),
}

# (type, type of the token embedding; None: the recipe's own). K and I types need rows of a multiple of 256 weights;
# llama.cpp stores other rows as IQ4_NL, Q5_0 and similar, so sizes depend on the model.
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
    """The contestants of all peers, each with its tool's own calibration or importance matrix."""
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
    """This tool with default options at `bits` per weight, and with `--effort best` at those of `best`."""
    found = [Contestant(f"ciuic {value:g}", OURS, {"bpw": value}, curve=True) for value in bits]
    effort = {"arguments": ["--effort", "best"]}
    return found + [Contestant(f"ciuic {value:g}, best", OURS, {"bpw": value, **effort}) for value in best]
