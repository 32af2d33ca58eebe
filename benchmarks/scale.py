"""Does memory depend on the number of layers, and do runs keep to their forecasts? Compresses random MoE checkpoints.

    python benchmarks/scale.py --layers 3 12            # about 0.3 and 1.2 GB
    python benchmarks/scale.py --layers 20 80           # about 2 and 8 GB

Each checkpoint has DeepSeek-V3's architecture and tensor names, random weights, and 100 MB per layer. Every compression
runs in its own process. The table shows its peak resident bytes, the peak bytes of its output folder and journal on
disk, and its seconds, each beside the run's own forecast. Exits with 1 if the peaks differ by 10 % or more, if one
reaches 4 GB, or if a run takes 20 % more or less time than its forecast.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ciuic_cli.artifact.writer import REPORT
from ciuic_cli.report.schema import ForecastReport, MemoryReport

HIDDEN, EXPERT, EXPERTS, HEADS, VOCABULARY = 1024, 512, 32, 8, 4096
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 384, 256, 64, 32, 64
SPREAD = 0.10
"""Largest accepted difference of the peaks, relative to the smallest."""
LIMIT = 4 * 10**9
"""Largest accepted peak, in bytes."""
FORECAST_ERROR = 0.20
"""Largest accepted difference between a run's seconds and its forecast, relative to the forecast."""
TOKENIZER = Path(__file__).parent.parent / "samples" / "deepseek-v3-tiny"


def config(layers: int) -> dict[str, Any]:
    """DeepSeek-V3's config with the sizes above."""
    return {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": 4 * EXPERT, "moe_intermediate_size": EXPERT, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "n_routed_experts": EXPERTS,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "dtype": "bfloat16", "bos_token_id": 0,
        "eos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """On-disk names and shapes of one decoder layer."""
    base, attention, mlp = f"model.layers.{layer}.", "self_attn.", "mlp."
    shapes: dict[str, tuple[int, ...]] = {
        f"{attention}q_a_proj.weight": (Q_RANK, HIDDEN),
        f"{attention}q_a_layernorm.weight": (Q_RANK,),
        f"{attention}q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        f"{attention}kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, HIDDEN),
        f"{attention}kv_a_layernorm.weight": (KV_RANK,),
        f"{attention}kv_b_proj.weight": (HEADS * (NOPE + VALUE), KV_RANK),
        f"{attention}o_proj.weight": (HIDDEN, HEADS * VALUE),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        f"{mlp}gate.weight": (EXPERTS, HIDDEN),
        f"{mlp}gate.e_score_correction_bias": (EXPERTS,),
    }
    for owner in ["shared_experts", *(f"experts.{expert}" for expert in range(EXPERTS))]:
        shapes |= {f"{mlp}{owner}.{part}_proj.weight": (EXPERT, HIDDEN) for part in ("gate", "up")}
        shapes[f"{mlp}{owner}.down_proj.weight"] = (HIDDEN, EXPERT)
    return {base + name: shape for name, shape in shapes.items()}


def make(folder: Path, layers: int) -> int:
    """Write the checkpoint with one shard per layer. Returns its size in bytes."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(layers)
    embedding_and_head = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    shards = [layer_shapes(layer) for layer in range(layers)] + [
        {**embedding_and_head, "model.norm.weight": (HIDDEN,)}
    ]
    weight_map, total = {}, 0
    for number, shapes in enumerate(shards):
        tensors = {}
        for name, shape in shapes.items():
            if len(shape) == 1:
                dtype = torch.float32 if "bias" in name else torch.bfloat16
                tensors[name] = torch.full(shape, 0.0 if "bias" in name else 1.0, dtype=dtype)
            else:
                value = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
                tensors[name] = value.to(torch.bfloat16)
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += (folder / file).stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(layers)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    return total


class DiskWatch(threading.Thread):
    """Records a folder's peak size in bytes. Looks twice a second, or less often to take at most 1 % of the time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.peak, self.stop = folder, 0, threading.Event()

    def run(self) -> None:
        pause = 0.5
        while not self.stop.wait(pause):
            started = time.monotonic()
            self.peak = max(self.peak, _bytes_in(self.folder))
            pause = max(0.5, 100 * (time.monotonic() - started))


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # renamed or deleted meanwhile
            continue
    return total


def compress(source: Path, out: Path, arguments: list[str]) -> tuple[dict[str, float], ForecastReport]:
    """Compress in a new process. Returns its peak resident bytes, peak bytes on disk and wall seconds; its forecast."""
    out.mkdir(parents=True)
    watch = DiskWatch(out)
    watch.start()
    started = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "ciuic_cli",
        "compress",
        str(source),
        str(out / "artifact"),
        *arguments,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    watch.stop.set()
    watch.join()
    rss_unit = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
    report = MemoryReport.from_json((out / "artifact" / REPORT).read_text(encoding="utf-8"))
    assert report.forecast is not None  # a run that was not continued
    return {"peak": rss_unit * usage.ru_maxrss, "disk": watch.peak, "wall": seconds}, report.forecast


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 12])
    parser.add_argument("--folder", type=Path, default=Path("build/scale"))
    parser.add_argument("--nsamples", type=int, default=2, help="calibration sequences")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    options = parser.parse_args()
    print("layers | checkpoint GB | memory GB, forecast | disk GB, forecast | seconds, forecast")
    peaks, errors = [], []
    for layers in options.layers:
        source, out = options.folder / f"layers{layers}", options.folder / f"out{layers}"
        size = make(source, layers) if not source.exists() else _bytes_in(source)
        shutil.rmtree(out, ignore_errors=True)
        measured, expected = compress(source, out, ["--effort", "fast", "--nsamples", str(options.nsamples)])
        peaks.append(measured["peak"])
        errors.append(measured["wall"] / expected.total_seconds - 1)
        print(
            f"{layers} | {size / 1e9:.2f} | {peaks[-1] / 1e9:.2f}, {expected.peak_rss_bytes / 1e9:.1f} | "
            f"{measured['disk'] / 1e9:.2f}, {expected.disk_bytes / 1e9:.1f} | "
            f"{measured['wall']:.0f}, {expected.total_seconds:.0f} ({errors[-1]:+.0%})",
            flush=True,
        )
        shutil.rmtree(out)
        if not options.keep:
            shutil.rmtree(source)
    spread = max(peaks) / min(peaks) - 1
    print(f"peaks differ by {spread:.1%} (limit: {SPREAD:.0%}), the highest is {max(peaks) / 1e9:.2f} GB")
    within = all(abs(error) <= FORECAST_ERROR for error in errors)
    return int(spread >= SPREAD or max(peaks) >= LIMIT or not within)


if __name__ == "__main__":
    sys.exit(main())
