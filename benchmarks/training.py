"""Peak memory and time of a training step: LoRA on an artifact beside LoRA on its bfloat16 original.

    python benchmarks/training.py ARTIFACT ORIGINAL [--rows 2] [--tokens 512] [--steps 4] [--rank 16]

Each way runs in a process of its own, one after another. `ciuic` is the step of `ciuic train`; `PEFT` is plain PEFT
with the loss of transformers. Memory is the process's resident size above what it was before the model was loaded, at
the peak of each phase; the first step is left out. Times are CPU times of all threads, which other processes disturb
least. The data are random tokens, all of which are learned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.process.memory import configure_allocators, peak_resident_bytes, resident_bytes

WAYS = ("ciuic", "PEFT on the artifact", "PEFT on bfloat16")
"""The ways of training that are compared. The last one is the peer."""
PHASES = ("load", "forward", "backward", "optimizer")
"""The parts of a run whose peaks are shown."""


def reset_peak() -> None:
    """Let `peak_resident_bytes` count from now on (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes at the peak of each phase, milliseconds of each step, and losses."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import ciuic_cli  # noqa: F401  registers artifacts with transformers
    from ciuic_cli.train.loss import chunked_loss
    from ciuic_cli.train.trainer import limit_memory

    torch.manual_seed(0)
    if way == WAYS[0]:
        configure_allocators()
    folder = options.original if way == WAYS[2] else options.artifact
    started = resident_bytes()
    reset_peak()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        base,
        LoraConfig(task_type="CAUSAL_LM", r=options.rank, lora_alpha=2 * options.rank, target_modules=names),
    )
    model.config.use_cache = False
    if way == WAYS[0]:
        limit_memory(base)
    if options.checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    peaks = {"load": peak_resident_bytes() - started}
    times, cpu_times, losses = [], [], []
    ids = torch.randint(3, 40000, (options.rows, options.tokens), generator=torch.Generator().manual_seed(0))
    for step in range(options.steps + 1):
        seen = {}
        reset_peak()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        loss = (
            chunked_loss(model, {"input_ids": ids}, ids)
            if way == WAYS[0]
            else model(input_ids=ids, labels=ids).loss
        )
        seen["forward"] = peak_resident_bytes()
        reset_peak()
        loss.backward()
        seen["backward"] = peak_resident_bytes()
        reset_peak()
        optimizer.step()
        optimizer.zero_grad()
        seen["optimizer"] = peak_resident_bytes()
        if step:
            times.append(1e3 * (time.perf_counter() - begin))
            cpu_times.append(1e3 * (time.process_time() - begin_cpu))
            for phase, value in seen.items():
                peaks[phase] = max(peaks.get(phase, 0), value - started)
        losses.append(loss.item())
        del loss
    return {"peaks": peaks, "times": times, "cpu_times": cpu_times, "losses": losses, "started": started}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    parser.add_argument("original")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again, in all ways")
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process, as JSON")
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(options.way, options)))
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, *sys.argv, "--way", way]
        found[way] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    peer = found[WAYS[2]]
    print(
        f"| way | {' | '.join(f'{phase} MB' for phase in PHASES)} | peak, of peer's | step, of peer's | CPU ms | loss |"
    )
    print("|---|" + "---|" * (len(PHASES) + 4))
    for way, one in found.items():
        peaks = [one["peaks"][phase] / 1e6 for phase in PHASES]
        whole = max(one["peaks"].values()) / max(peer["peaks"].values())
        step = statistics.median(one["cpu_times"])
        print(
            f"| {way} | {' | '.join(f'{peak:.0f}' for peak in peaks)} | {whole:.2f} "
            f"| {step / statistics.median(peer['cpu_times']):.2f} | {step:.0f} | {one['losses'][-1]:.4f} |"
        )


if __name__ == "__main__":
    main()
