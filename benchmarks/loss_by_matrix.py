"""Compares the KL that each compressed matrix causes alone with the KL that the report predicts for it.

    python benchmarks/loss_by_matrix.py ARTIFACT ORIGINAL --text FILE... [--tokens 384] [--begin 5120]

One matrix at a time of the original takes the artifact's values. KL(original || changed) is a mean over --tokens tokens
of every text, beginning with token --begin. Prints one line for each role, a number for each layer:
measured over predicted KL, divided by the role's mean. The model has the modules of Llama.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ciuic_cli.export.dense import export_dense

ROLES = {
    "q": "self_attn.q_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("original", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--begin", type=int, default=5120)
    arguments = parser.parse_args()
    report = json.loads((arguments.artifact / "memory_report.json").read_text())
    predicted = {each["name"]: each["predicted_kl"] for each in report["components"]}
    with tempfile.TemporaryDirectory() as folder:
        dense = Path(folder) / "dense"
        export_dense(arguments.artifact, dense, to="fp32")
        decoded = {
            name: each for file in dense.glob("*.safetensors") for name, each in load_file(file).items()
        }
    model = AutoModelForCausalLM.from_pretrained(arguments.original, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.original)
    begin, end = arguments.begin, arguments.begin + arguments.tokens
    batch = torch.tensor(
        [
            tokenizer(file.read_text()[: 20 * end], add_special_tokens=False).input_ids[begin:end]
            for file in arguments.text
        ]
    )
    inputs: list[torch.Tensor] = []
    others: dict[str, Any] = {}

    def keep(_: torch.nn.Module, positional: tuple[torch.Tensor], named: dict[str, Any]) -> None:
        inputs.append(positional[0])
        others.update(named)

    layers = model.model.layers
    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    original = model(batch, use_cache=False).logits.log_softmax(-1)
    for handle in handles:
        handle.remove()
    ratios: dict[str, list[float]] = {role: [] for role in ROLES}
    for number, states in enumerate(inputs):
        for role, place in ROLES.items():
            name = f"model.layers.{number}.{place}.weight"
            weight = model.get_parameter(name)
            kept = weight.data
            weight.data = decoded[name]
            hidden = states
            for layer in layers[number:]:
                hidden = layer(hidden, **others)
            changed = model.lm_head(model.model.norm(hidden)).log_softmax(-1)
            weight.data = kept
            loss = (original.exp() * (original - changed)).sum(-1).mean()
            ratios[role].append(float(loss) / predicted[name])
    for role, found in ratios.items():
        mean = sum(found) / len(found)
        print(f"{role:5}", *(f"{ratio / mean:.2f}" for ratio in found), f" mean {mean:.2f}")


if __name__ == "__main__":
    main()
