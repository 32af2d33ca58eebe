"""Bytes of a model's weights in memory: an artifact beside its original with bitsandbytes' NF4 in transformers.

    python benchmarks/nf4_memory.py ARTIFACT ORIGINAL

Counted are all parameters and buffers after loading for training, once per storage. NF4 with double quantization is
what QLoRA uses; bitsandbytes replaces linear layers and leaves fused experts, embeddings and the head as they are.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from training_quality import weight_bytes
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ciuic_cli  # noqa: F401  registers artifacts with transformers


def states_bytes(model: Any) -> int:
    """Bytes of the quantization states that bitsandbytes keeps beside its parameters: scales and code tables."""
    found = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            found += sum(value.nbytes for value in (state.absmax, state.code))
            state = state.state2
    return found


def dense_by_kind(model: Any) -> Counter[str]:
    """Bytes of floating parameters by the last part of their module's name."""
    found: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            found[".".join(name.split(".")[-2:])] += parameter.nbytes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    parser.add_argument("original")
    options = parser.parse_args()
    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    models = {
        "bfloat16": AutoModelForCausalLM.from_pretrained(options.original, dtype=torch.bfloat16),
        "NF4": AutoModelForCausalLM.from_pretrained(
            options.original, dtype=torch.bfloat16, quantization_config=quantized, device_map="cpu"
        ),
        "ciuic": AutoModelForCausalLM.from_pretrained(options.artifact, dtype=torch.bfloat16),
    }
    weights = sum(parameter.numel() for parameter in models["bfloat16"].parameters())
    nf4 = weight_bytes(models["NF4"]) + states_bytes(models["NF4"])
    print("| way | MB | bits per weight | of NF4's |")
    print("|---|---|---|---|")
    for name, model in models.items():
        count = nf4 if name == "NF4" else weight_bytes(model)
        print(f"| {name} | {count / 1e6:.2f} | {8 * count / weights:.2f} | {count / nf4:.3f} |")
    dense = ", ".join(f"{name} {n / 1e6:.2f} MB" for name, n in dense_by_kind(models["NF4"]).most_common(4))
    print(f"\nleft dense by NF4: {dense}")


if __name__ == "__main__":
    main()
