"""Held-out loss of LoRA on an artifact beside plain PEFT on the bfloat16 original, and the bytes of the weights.

    python samples/examples.py samples/text/calibration.txt build/train.jsonl
    python samples/examples.py samples/text/heldout.txt build/heldout.jsonl --most 300
    python benchmarks/training_quality.py ARTIFACT ORIGINAL build/train.jsonl build/heldout.jsonl

All ways train with the same examples, rows, order, rank, targets, rate and schedule. `ciuic` is the engine of
`ciuic train`; `PEFT` is PEFT with transformers' Trainer and transformers' loss. The loss is the mean over the learned
tokens of the held-out file, computed by transformers' forward of the adapted model, in the dtype of its training.
Finished runs are kept in `--work` and not repeated.

`--decoded FOLDER`, which `ciuic export ARTIFACT FOLDER --to bf16` writes: PEFT trains on it as well. `--exchange`:
each adapter is also measured on the weights that it was not trained on. This separates what the training loses from
what the weights lose.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

WAYS = {
    "peer": "PEFT on the original",
    "ciuic": "ciuic on the artifact",
    "decoded": "PEFT on the decoded artifact",
}
"""The peer, what is measured against it, and the peer on the numbers of the artifact."""


def rows_of(folder: str, file: Path, length: int) -> list[Any]:
    """The packed rows of a file."""
    from ciuic_cli.text.tokenizer import open_tokenizer
    from ciuic_cli.train.examples import Limits, read_examples
    from ciuic_cli.train.packing import pack

    limits = Limits(length, None, 1 << 30)
    return pack(read_examples(file, open_tokenizer(folder), limits, train_on_inputs=False), length)


def learned_losses(model: Any, rows: list[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each row, log-probabilities (n, V) at its n learned tokens, float32, and these tokens, int64 (n,)."""
    from ciuic_cli.train.examples import IGNORED
    from ciuic_cli.train.packing import batch_of

    model.eval()
    for row in rows:
        batch = batch_of([row], 0)
        labels = batch.pop("labels")[0, 1:]
        places = (labels != IGNORED).nonzero()[:, 0]
        with torch.no_grad():
            logits = model(**batch, use_cache=False, logits_to_keep=places).logits[0]
        yield logits.float().log_softmax(-1), labels[places]


def mean_loss(model: Any, rows: list[Any]) -> float:
    """Mean cross entropy of all learned tokens, in nats."""
    total, learned = 0.0, 0
    for of_row, tokens in learned_losses(model, rows):
        total -= float(of_row.gather(1, tokens[:, None]).sum())
        learned += len(tokens)
    return total / learned


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers but the adapter's; shared storage is counted once."""
    tensors = [
        tensor.untyped_storage()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if "lora_" not in name
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in tensors}.values())


def compared(original: Any, artifact: Any, rows: list[Any]) -> dict[str, float]:
    """Two models with the same adapter: mean losses in nats, their difference, its standard error by rows, and the mean
    KL of the second from the first over the learned tokens."""
    sums: list[tuple[int, float, float, float]] = []
    both = zip(learned_losses(original, rows), learned_losses(artifact, rows), strict=True)
    for (p, tokens), (q, _) in both:
        of_p, of_q = (-float(each.gather(1, tokens[:, None]).sum()) for each in (p, q))
        sums.append((len(tokens), of_p, of_q, float((p.exp() * (p - q)).sum())))
    learned, of_p, of_q, kl = (sum(column) for column in zip(*sums, strict=True))
    difference = (of_q - of_p) / learned
    spread = sum((q - p - difference * count) ** 2 for count, p, q, _ in sums)
    return {
        "original": of_p / learned,
        "artifact": of_q / learned,
        "difference": difference,
        "error": math.sqrt(spread * len(sums) / (len(sums) - 1)) / learned,
        "kl": kl / learned,
    }


def exchange(seed: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By way, and for no adapter: the adapter of this seed on the original and on the artifact."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import ciuic_cli  # noqa: F401  registers artifacts with transformers

    rows = rows_of(options.original, options.heldout_file, options.tokens)
    found = {}
    for way in (*ways_of(options), None):
        models = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            for folder in (options.original, options.artifact)
        ]
        if way is not None:
            models = [PeftModel.from_pretrained(model, adapter_of(way, seed, options)) for model in models]
        found[way or "none"] = compared(*models, rows)
        print(way, found[way or "none"], file=sys.stderr, flush=True)
    return found


def ways_of(options: argparse.Namespace) -> list[str]:
    return [way for way in WAYS if way != "decoded" or options.decoded is not None]


def adapter_of(way: str, seed: int, options: argparse.Namespace) -> Path:
    """The folder of a trained adapter."""
    folder: Path = options.work / f"adapter-{way}-{seed}"
    return folder


def measure(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Held-out loss after the training, with seed 0 also before it; trained parameters; bytes of the weights."""
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

    import ciuic_cli  # noqa: F401  registers artifacts with transformers
    from ciuic_cli.train.engine import train
    from ciuic_cli.train.options import TrainOptions
    from ciuic_cli.train.packing import batch_of
    from ciuic_cli.train.targets import lora_config

    chosen = TrainOptions(
        train_file=options.train_file, max_steps=options.steps, sequence_len=options.tokens,
        learning_rate=options.learning_rate, lora_r=options.rank, lora_alpha=2 * options.rank, seed=seed,
    )  # fmt: skip
    folder = {"peer": options.original, "ciuic": options.artifact, "decoded": options.decoded}[way]
    out = adapter_of(way, seed, options)
    held_out = rows_of(folder, options.heldout_file, options.tokens)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found: dict[str, Any] = {"weight_bytes": weight_bytes(base)}
    if seed == 0 and not options.exchange:  # which measures all losses
        found["before"] = mean_loss(base, held_out)
    if way == "ciuic":
        train(folder, out, chosen, device="cpu")
        model = PeftModel.from_pretrained(base, out)
    else:
        rows = rows_of(folder, options.train_file, options.tokens)
        set_seed(seed)
        model = get_peft_model(base, lora_config(base, chosen))
        model.config.use_cache = False
        arguments = TrainingArguments(
            output_dir=str(options.work / "peer"), max_steps=chosen.max_steps, learning_rate=chosen.learning_rate,
            per_device_train_batch_size=1, lr_scheduler_type=chosen.lr_scheduler_type, optim=chosen.optim, seed=seed,
            use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
            logging_steps=50, dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(
            model=model, args=arguments, train_dataset=rows, data_collator=lambda batch: batch_of(batch, 0)
        ).train()
        model.save_pretrained(out)
    if not options.exchange:
        found["after"] = mean_loss(model, held_out)
    found["trained"] = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    parser.add_argument("original")
    parser.add_argument("train_file", type=Path)
    parser.add_argument("heldout_file", type=Path)
    parser.add_argument("--work", type=Path, default=Path("build/training-quality"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=512, help="of a row; a step has one row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--decoded", help="the artifact as `ciuic export --to bf16` writes it")
    parser.add_argument(
        "--exchange", action="store_true", help="measure each adapter on the other weights too"
    )
    parser.add_argument("--way", choices=[*WAYS, "exchange"], help="only this one, in this process, as JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the run of --way")
    options = parser.parse_args()
    if options.way is not None:
        one = exchange if options.way == "exchange" else partial(measure, options.way)
        print(json.dumps(one(options.seed, options)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    steps = [*ways_of(options), *(["exchange"] if options.exchange else [])]
    found: dict[str, list[dict[str, Any]]] = {step: [] for step in steps}
    for seed in range(options.seeds):
        for step in steps:
            file = options.work / f"{step}-{seed}.json"
            if not file.exists():
                command = [sys.executable, *sys.argv, "--way", step, "--seed", str(seed)]
                said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
                file.write_text(said.splitlines()[-1])
            found[step].append(json.loads(file.read_text()))
    for seed, runs in enumerate(found.get("exchange", [])):
        for way in ways_of(options):
            place = "original" if way == "peer" else "artifact"
            found[way][seed] |= {"before": runs["none"][place], "after": runs[way][place]}
    for way in ways_of(options)[1:]:
        show(found["peer"], found[way], WAYS[way])
    for seed, runs in enumerate(found.get("exchange", [])):
        show_exchange(seed, runs)
    stored = sum(file.stat().st_size for file in Path(options.artifact).glob("*.safetensors"))
    peer, ours = found["peer"][0], found["ciuic"][0]
    print(
        f"\nweights in memory: {ours['weight_bytes']:,} bytes, {ours['weight_bytes'] / stored:.4f} of the artifact's "
        f"{stored:,}; the peer's {peer['weight_bytes']:,}. "
        f"Trained parameters: {ours['trained']:,} and {peer['trained']:,}."
    )


def show(peer: list[dict[str, Any]], ours: list[dict[str, Any]], way: str) -> None:
    print(f"\n{way}\n\n| seed | peer | this | this over peer, nats | this over peer |")
    print("|---|---|---|---|---|")
    rows = [("before", peer[0]["before"], ours[0]["before"])]
    rows += [
        (str(seed), theirs["after"], mine["after"])
        for seed, (theirs, mine) in enumerate(zip(peer, ours, strict=True))
    ]
    rows.append(("mean", *(statistics.mean(one["after"] for one in runs) for runs in (peer, ours))))
    for name, theirs, mine in rows:
        print(f"| {name} | {theirs:.4f} | {mine:.4f} | {mine - theirs:+.4f} | {mine / theirs - 1:+.2%} |")


def show_exchange(seed: int, runs: dict[str, dict[str, float]]) -> None:
    print(f"\nseed {seed}\n\n| adapter | on the original | on the artifact | difference | KL |")
    print("|---|---|---|---|---|")
    for way, one in runs.items():
        print(
            f"| {WAYS.get(way, 'none')} | {one['original']:.4f} | {one['artifact']:.4f} "
            f"| {one['difference']:+.4f} ± {one['error']:.4f} | {one['kl']:.4f} |"
        )


if __name__ == "__main__":
    main()
