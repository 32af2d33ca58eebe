"""Tokens per second of llama.cpp and ciuic in the same run, for a checkpoint or a random model of 1.5 billion weights.

    python benchmarks/llama_cpp.py --bin llama.cpp/build/bin --artifact ARTIFACT --gguf MODEL-IQ4_NL.gguf
    python benchmarks/llama_cpp.py --bin llama.cpp/build/bin --random build/random --types IQ4_NL IQ4_XS Q4_K_M

The random model has the shape of Qwen2.5-1.5B. ciuic's has random codes at 4 bits per weight: every string of bits is
valid. llama.cpp's is a file of random float16 weights that llama-quantize quantizes. llama.cpp must be built for this
processor. Both generate 64 tokens on the same number of threads, in turns. Needs the `gguf` package.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from context import random_model
from generation import milliseconds
from transformers import AutoModelForCausalLM, Qwen2Config

SHAPE: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def write_random_gguf(path: Path) -> None:
    """The same shape with random float16 weights."""
    import gguf

    hidden, heads, kv_heads = (
        SHAPE[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    kv = hidden // heads * kv_heads
    writer = gguf.GGUFWriter(path, "qwen2", use_temp_file=True)
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(SHAPE["vocab_size"])
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
        else:
            values = generator.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5
            writer.add_tensor(name, values.astype(np.float16))

    add("token_embd.weight", SHAPE["vocab_size"], hidden)
    add("output_norm.weight", hidden)
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"blk.{layer}."
        add(prefix + "attn_norm.weight", hidden)
        add(prefix + "ffn_norm.weight", hidden)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            add(f"{prefix}attn_{name}.weight", rows, hidden)
            add(f"{prefix}attn_{name}.bias", rows)
        add(prefix + "attn_output.weight", hidden, hidden)
        for name in ("gate", "up"):
            add(f"{prefix}ffn_{name}.weight", SHAPE["intermediate_size"], hidden)
        add(prefix + "ffn_down.weight", hidden, SHAPE["intermediate_size"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(folder: Path, binaries: Path, kind: str) -> Path:
    """The random model quantized by llama-quantize, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    source, made = folder / "float16.gguf", folder / f"{kind}.gguf"
    if not made.exists():
        if not source.exists():
            write_random_gguf(source)
        subprocess.run(
            [binaries / "llama-quantize", source, made, kind], check=True, stdout=subprocess.DEVNULL
        )
    return made


def own_rate(model: Any, tokens: int) -> float:
    """Tokens per second of `generate` without the prompt, as llama-bench counts them."""
    return 1e3 * tokens / ((tokens + 1) * milliseconds(model, tokens + 1) - milliseconds(model, 1))


def peer_rate(binaries: Path, file: Path, threads: int, tokens: int) -> float:
    """Tokens per second that llama-bench measures."""
    command = [
        binaries / "llama-bench",
        "-m",
        file,
        "-n",
        tokens,
        "-p",
        0,
        "-t",
        threads,
        "-r",
        1,
        "-o",
        "json",
    ]
    out = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
    rate: float = json.loads(out)[0]["avg_ts"]
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="folder of llama-bench and llama-quantize")
    parser.add_argument("--artifact")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--random", type=Path, help="folder for files of the random model")
    parser.add_argument("--types", nargs="*", default=["IQ4_NL", "IQ4_XS", "Q4_K_M"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    files = [*options.gguf]
    if options.random:
        files += [quantized(options.random, options.bin, kind) for kind in options.types]
        model = random_model(Qwen2Config(**SHAPE), torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.artifact).eval()
    torch.set_num_threads(options.threads)
    milliseconds(model, 8)  # makes the programs
    ours: list[float] = []
    peers: dict[Path, list[float]] = {file: [] for file in files}
    for _ in range(options.rounds):
        ours.append(own_rate(model, options.tokens))
        for file in files:
            peers[file].append(peer_rate(options.bin, file, options.threads, options.tokens))
    rate = statistics.median(ours)
    print(f"ciuic: {rate:.1f} tokens/s ({min(ours):.1f} to {max(ours):.1f})")
    for file, rates in peers.items():
        middle = statistics.median(rates)
        print(
            f"{file.stem}: {middle:.1f} ({min(rates):.1f} to {max(rates):.1f}); ciuic has {rate / middle:.2f} of it"
        )


if __name__ == "__main__":
    main()
