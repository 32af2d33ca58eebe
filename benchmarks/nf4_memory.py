"""Bytes of a model's weights in memory: an artifact beside its original with bitsandbytes' NF4 in transformers.

    python benchmarks/nf4_memory.py ARTIFACT ORIGINAL
    python benchmarks/nf4_memory.py --shapes qwen3_moe mixtral

Counted are all parameters and buffers after loading for training, once per storage. NF4 with double quantization is
what QLoRA uses; bitsandbytes replaces linear layers and leaves fused experts, embeddings and the head as they are.
With --shapes, nothing is loaded: transformers' default configurations of these model types, by arithmetic.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from training_quality import weight_bytes
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import ciuic_cli  # noqa: F401  registers artifacts with transformers

NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bits per weight of NF4 with double quantization: codes, a scale of 8 bits per 64 weights, and one of 32 bits for 256
of those."""
CIUIC_BITS = 4.0
"""Bits per weight of an artifact at 4:1, everything included."""


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


def shares(model_type: str) -> tuple[int, float, float]:
    """(parameters, share of fused experts, share of linear layers but the head) of a type's default configuration."""
    config = AutoConfig.for_model(model_type)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # imported here: no code is imported on a device
    with torch.device("meta"):
        model = kind(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3)
    head = model.get_output_embeddings()
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    return total, experts / total, linear / total


def show_shapes(model_types: list[str]) -> None:
    """Print the ratio for each type, the largest first."""
    rows = [(*shares(name), name) for name in model_types]
    print("| model type | 10^9 parameters | experts | linear layers | of NF4's |")
    print("|---|---|---|---|---|")
    for total, experts, linear, name in sorted(rows, key=lambda row: row[2], reverse=True):
        nf4 = NF4_BITS * linear + 16 * (1 - linear)
        print(f"| {name} | {total / 1e9:.1f} | {experts:.1%} | {linear:.1%} | {CIUIC_BITS / nf4:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", nargs="?")
    parser.add_argument("original", nargs="?")
    parser.add_argument("--shapes", nargs="+", metavar="TYPE", help="model types of transformers")
    options = parser.parse_args()
    if options.shapes:
        show_shapes(options.shapes)
        return
    if options.original is None:
        parser.error("give ARTIFACT and ORIGINAL, or --shapes")
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
