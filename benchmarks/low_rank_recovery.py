"""Trains low-rank parts by distillation from the original, and measures what they add to an artifact's recovery.

    python benchmarks/low_rank_recovery.py ARTIFACT ORIGINAL TEXT HELDOUT [--rank 4] [--steps 60]

LoRA factors on all attention layers and expert stacks are trained through the layers of `ciuic train`. The loss is
that of `ciuic_cli/recovery/gradients.py`, the root of each token's KL(original || artifact), and so are the schedule
and the batch. KL is measured on HELDOUT at the start and four times on the way. The last line says how many bits per
weight the factors take in 8 bits, and what the same bits would have gained as codes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import ciuic_cli
from ciuic_cli.recovery.gradients import KL_FLOOR, STEP_SEQUENCES
from ciuic_cli.recovery.schedule import learning_rate
from ciuic_cli.recovery.tuning import ADAM_BETAS, EVALUATIONS
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.targets import lora_config

FACTOR_BITS = 8
"""Bits per number of stored factors, as `ciuic merge --method low-rank` codes them."""


def sequences(tokenizer: Any, file: str, count: int, length: int) -> torch.Tensor:
    """(count, length) token ids: the text's sequences, evenly spaced."""
    with open(file, encoding="utf-8") as stream:
        ids = tokenizer(stream.read(), return_tensors="pt", verbose=False).input_ids[0]
    rows = ids[: len(ids) // length * length].view(-1, length)
    return rows[torch.linspace(0, len(rows) - 1, count).long()]


def divergence(original: Any, tuned: Any, ids: torch.Tensor) -> torch.Tensor:
    """KL(original || tuned) of every token, in nats: (sequences, length)."""
    with torch.no_grad():
        log_p = original(ids, use_cache=False).logits.float().log_softmax(-1)
    log_q = tuned(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@torch.no_grad()
def mean_divergence(original: Any, tuned: Any, rows: torch.Tensor) -> float:
    """Mean KL of all tokens, in nats."""
    return float(torch.stack([divergence(original, tuned, row[None]).mean() for row in rows]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("artifact", "original", "text", "heldout"):
        parser.add_argument(name)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--held-out", type=int, default=24, help="sequences that KL is measured on")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of recovery's learning rate")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.original)
    original: Any = AutoModelForCausalLM.from_pretrained(options.original, dtype=torch.float32).eval()
    base = ciuic_cli.load(options.artifact, device="cpu", dtype=torch.float32)
    weights = sum(parameter.numel() for parameter in original.parameters())
    chosen = TrainOptions(train_file=options.text, lora_r=options.rank, lora_alpha=options.rank)
    tuned = get_peft_model(base, lora_config(base, chosen)).eval()
    factors = [parameter for name, parameter in tuned.named_parameters() if "lora_" in name]
    held_out = sequences(tokenizer, options.heldout, options.held_out, options.length)
    text = sequences(tokenizer, options.text, options.steps * STEP_SEQUENCES, options.length)
    text = text[torch.randperm(len(text))].view(options.steps, STEP_SEQUENCES, options.length)
    kls = [mean_divergence(original, tuned, held_out)]
    print(f"step 0: KL {kls[0]:.6f}", flush=True)
    optimizer = torch.optim.Adam(factors, betas=ADAM_BETAS)
    for step, batch in enumerate(text):
        for sequence in batch:
            kl = divergence(original, tuned, sequence[None])
            (2 * (kl.clamp_min(0) + KL_FLOOR).sqrt().mean() / STEP_SEQUENCES).backward()
        rate = options.rate * learning_rate(step, options.steps, kls[0])
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, options.steps // EVALUATIONS) == 0:
            kls.append(mean_divergence(original, tuned, held_out))
            print(f"step {step + 1}: KL {kls[-1]:.6f}", flush=True)
    bits = FACTOR_BITS * sum(parameter.numel() for parameter in factors) / weights
    print(
        f"best {min(kls) / kls[0] - 1:+.1%}; the factors take {bits:.3f} bits per weight, "
        f"with which codes would have {2 ** (-2 * bits) - 1:+.1%}"
    )


if __name__ == "__main__":
    main()
