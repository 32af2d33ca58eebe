"""Held-out loss of LoRA on an artifact beside plain PEFT on the bfloat16 original, and the bytes of the weights.

    python samples/examples.py samples/text/calibration.txt build/train.jsonl
    python samples/examples.py samples/text/heldout.txt build/heldout.jsonl --most 300
    python benchmarks/training_quality.py ARTIFACT ORIGINAL build/train.jsonl build/heldout.jsonl

Both ways train with the same examples, rows, order, rank, targets, rate and schedule. `ciuic` is the engine of
`ciuic train`; `PEFT` is PEFT with transformers' Trainer and transformers' loss. The loss is the mean over the learned
tokens of the held-out file, computed by transformers' forward of the adapted model, in the dtype of its training.
Finished runs are kept in `--work` and not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

WAYS = ("PEFT on bfloat16", "ciuic on the artifact")
"""The peer, and what is measured against it."""


def rows_of(folder: str, file: Path, length: int) -> list[Any]:
    """The packed rows of a file."""
    from ciuic_cli.text.tokenizer import open_tokenizer
    from ciuic_cli.train.examples import Limits, read_examples
    from ciuic_cli.train.packing import pack

    limits = Limits(length, None, 1 << 30)
    return pack(read_examples(file, open_tokenizer(folder), limits, train_on_inputs=False), length)


def mean_loss(model: Any, rows: list[Any]) -> float:
    """Mean cross entropy of all learned tokens, in nats."""
    from ciuic_cli.train.examples import IGNORED
    from ciuic_cli.train.packing import batch_of

    total, learned = 0.0, 0
    model.eval()
    for row in rows:
        batch = batch_of([row], 0)
        with torch.no_grad():
            loss = model(**batch, use_cache=False).loss
        count = int((batch["labels"][:, 1:] != IGNORED).sum())
        total, learned = total + float(loss) * count, learned + count
    return total / learned


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers but the adapter's; shared storage is counted once."""
    tensors = [
        tensor.untyped_storage()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if "lora_" not in name
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in tensors}.values())


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
    folder = options.artifact if way == WAYS[1] else options.original
    held_out = rows_of(folder, options.heldout_file, options.tokens)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found: dict[str, Any] = {"weight_bytes": weight_bytes(base)}
    if seed == 0:
        found["before"] = mean_loss(base, held_out)
    if way == WAYS[1]:
        out = options.work / f"adapter-{seed}"
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
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process, as JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the run of --way")
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(options.way, options.seed, options)))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        for way in WAYS:
            file = options.work / f"{way.split()[0]}-{seed}.json"
            if not file.exists():
                command = [sys.executable, *sys.argv, "--way", way, "--seed", str(seed)]
                said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
                file.write_text(said.splitlines()[-1])
            found[way].append(json.loads(file.read_text()))
    show(found, options)


def show(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    peer, ours = (found[way] for way in WAYS)
    print("| seed | peer | ciuic | ciuic over peer, nats | ciuic over peer |")
    print("|---|---|---|---|---|")
    rows = [("before", peer[0]["before"], ours[0]["before"])]
    rows += [
        (str(seed), theirs["after"], mine["after"])
        for seed, (theirs, mine) in enumerate(zip(peer, ours, strict=True))
    ]
    rows.append(("mean", *(statistics.mean(one["after"] for one in runs) for runs in (peer, ours))))
    for name, theirs, mine in rows:
        print(f"| {name} | {theirs:.4f} | {mine:.4f} | {mine - theirs:+.4f} | {mine / theirs - 1:+.2%} |")
    stored = sum(file.stat().st_size for file in Path(options.artifact).glob("*.safetensors"))
    resident = ours[0]["weight_bytes"]
    print(
        f"\nweights in memory: {resident:,} bytes, {resident / stored:.4f} of the artifact's {stored:,}; "
        f"the peer's {peer[0]['weight_bytes']:,}. "
        f"Trained parameters: {ours[0]['trained']:,} and {peer[0]['trained']:,}."
    )


if __name__ == "__main__":
    main()
