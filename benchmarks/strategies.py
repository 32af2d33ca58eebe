"""Ways to train the sample, measured: memory, time and loss after some steps, each in processes of its own.

    python benchmarks/strategies.py samples/deepseek-v3-tiny [--artifact FOLDER] [--steps 100] [--rows 4] [--tokens 128]

Every way trains on the first four fifths of `--text` (default: samples/text/heldout.txt, on which the sample was not
trained) with the same rows per step, learning rate and schedule. Loss is the mean of the last fifth of the steps.
Planned bytes are those of `ciuic plan`; resident memory is the highest of the process, interpreter and libraries
included (about 0.6 GB). Seconds are wall time of a step: compare them only on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ciuic_cli.text.tokenizer import open_tokenizer
from ciuic_cli.train.planning.memory_plan import PlannedModel, plan_memory
from ciuic_cli.train.planning.step import Batch
from ciuic_cli.train.planning.strategies import Strategy, strategies

ROOT = Path(__file__).parents[1]
LEARNING_RATE = {"full": 3e-4, "lora": 1e-3}
"""By method (chosen): the same for all ways of a method."""
FILLED = 3
"""Quarters of a row that an example is cut to (chosen): text that is decoded and encoded again may have more tokens."""


def examples(text: Path, model: Path, tokens: int, file: Path) -> None:
    """Write the first four fifths of a text as JSON lines, in pieces that fit rows of `tokens`."""
    tokenizer = open_tokenizer(model)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    ids, size = ids[: len(ids) * 4 // 5], tokens * FILLED // 4
    parts = [tokenizer.decode(ids[begin : begin + size]) for begin in range(0, len(ids), size)]
    file.write_text("\n".join(json.dumps({"text": part}) for part in parts))


def chosen(artifact: bool, rows: int, processes: int) -> list[Strategy]:
    """The strategies of `ciuic plan` for a process and for some; rows per process fall with their number."""
    found = [one for one in strategies(False, rows, [1], 16) if not one.compressed]
    found += [one for one in strategies(True, rows, [1], 16) if artifact]
    for one in strategies(False, rows // processes, [processes], 16):
        if one.options.gradient_accumulation_steps == 1 and (artifact or not one.compressed):
            found.append(one)
    return found


def run(
    strategy: Strategy, model: Path, data: Path, scratch: Path, steps: int, tokens: int
) -> dict[str, Any]:
    """Train; the report, with the highest resident bytes of a process that ran alone."""
    out = scratch / "out"
    rate = LEARNING_RATE[strategy.options.method]
    command = ["-m", "ciuic_cli", "train", str(model), str(out), *strategy.command.split(), "--quiet"]
    command += ["--train-file", str(data), "--sequence-len", str(tokens), "--max-steps", str(steps)]
    command += [
        "--learning-rate",
        str(rate),
        "--warmup-steps",
        str(max(1, steps // 20)),
        "--save-steps",
        str(steps + 1),
    ]
    if strategy.options.method == "lora":
        command += ["--lora-alpha", str(strategy.options.lora_alpha)]
    launcher = []
    if strategy.sharding is not None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={strategy.processes}"]
    with (scratch / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, *launcher, *command], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{strategy.name} failed:\n{(scratch / 'log').read_text()[-2000:]}")
    report: dict[str, Any] = json.loads((out / "train_report.json").read_text())
    return {**report, "resident": usage.ru_maxrss * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--artifact", type=Path, help="the model compressed, for LoRA on 4:1")
    parser.add_argument("--text", type=Path, default=ROOT / "samples" / "text" / "heldout.txt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="names of strategies; default: all")
    options = parser.parse_args()
    print("| strategy | planned MB | resident MB | loss, first | loss, last | s per step |")
    print("|---|---|---|---|---|---|", flush=True)
    for strategy in chosen(options.artifact is not None, options.rows, options.processes):
        if options.only and strategy.name not in options.only:
            continue
        model = options.artifact if strategy.compressed else options.model
        batch = Batch(strategy.rows, options.tokens)
        settings = replace(strategy.options, train_file=Path("none"))
        plan = plan_memory(
            PlannedModel.of_folder(model), settings, batch, sharding=strategy.sharding, whole=False
        )
        with TemporaryDirectory(prefix="ciuic-") as folder:
            scratch = Path(folder)
            examples(options.text, options.model, options.tokens, scratch / "data.jsonl")
            report = run(strategy, model, scratch / "data.jsonl", scratch, options.steps, options.tokens)
        losses = report["losses"]
        last = statistics.mean(losses[-max(1, len(losses) // 5) :])
        alone = f"{report['resident'] / 1e6:.0f}" if strategy.sharding is None else ""
        print(
            f"| {strategy.name} | {(plan.tensors + plan.residuals) / 1e6:.1f} | {alone} | {losses[0]:.4f} "
            f"| {last:.4f} | {report['seconds'] / report['steps']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
