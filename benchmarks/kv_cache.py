"""The KL that a quantized KV cache adds to an artifact.

    python benchmarks/kv_cache.py out/ --text samples/text/heldout.txt

Each window of the text is run twice with the same weights: its first half as a prompt, and then token by token, so that
every further token attends to what the cache returns. The reference is transformers' unquantized cache. `8 bits` and
`4 bits` are its HQQ backend, `fp8` its backend of that name, and `4 bits (quanto)` its default.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache, QuantizedCache

from ciuic_cli import load
from ciuic_cli.evaluation.bench_process import cache_keyword

GROUP, RESIDUAL = 64, 16
"""Numbers that share a scale, and tokens that are kept unquantized; transformers' default for the latter is 128, which
would hide the loss in the windows of a small model."""

CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("fp8", {}),
    "8 bits": ("hqq", {"nbits": 8, "axis_key": 1, "axis_value": 1}),
    "4 bits": ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "4 bits (quanto)": ("quanto", {"nbits": 4}),
}
_PACKAGES = {"hqq": "hqq", "quanto": "optimum"}


def windows(ids: torch.Tensor, length: int, count: int) -> Iterator[torch.Tensor]:
    """`count` windows [1, length], evenly spread over the ids [n]."""
    step = max(length, (len(ids) - length) // max(1, count - 1))
    for number in range(min(count, 1 + (len(ids) - length) // step)):
        yield ids[None, number * step : number * step + length]


def new_cache(model: Any, name: str | None) -> Any:
    """A cache of CACHES, or the unquantized one."""
    config = model.config.get_text_config(decoder=True)
    if name is None:
        return DynamicCache(config=config)
    backend, options = CACHES[name]
    grouped = {} if backend == "fp8" else {"q_group_size": GROUP, "residual_length": RESIDUAL}
    return QuantizedCache(backend, config, **options, **grouped)


@torch.inference_mode()
def log_probabilities(model: Any, window: torch.Tensor, name: str | None) -> torch.Tensor:
    """Log-probabilities where each token of the second half is predicted, float32 [tokens, vocabulary]."""
    half = window.shape[1] // 2
    cache = {cache_keyword(model): new_cache(model, name)}
    logits = [model(window[:, :half], **cache, logits_to_keep=1).logits]
    for position in range(half, window.shape[1] - 1):
        logits.append(model(window[:, position : position + 1], **cache).logits)
    return torch.cat(logits, dim=1)[0].float().log_softmax(-1)


def compare(expected: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """Mean KL in nats per token, and the share of tokens with the same most likely successor."""
    divergence = (expected.exp() * (expected - found)).sum(-1)
    return float(divergence.mean()), float((expected.argmax(-1) == found.argmax(-1)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    model = load(args.model, device="cpu", dtype=getattr(torch, args.dtype))
    ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(), return_tensors="pt").input_ids[0]
    text = list(windows(ids, args.length, args.windows))
    expected = torch.cat([log_probabilities(model, window, None) for window in text])
    print(f"{'cache':<18}{'KL (nats)':>12}{'same token':>12}")
    for name, (backend, _) in CACHES.items():
        if importlib.util.find_spec(_PACKAGES.get(backend, "torch")) is None:
            print(f"{name:<18}  {_PACKAGES[backend]} is not installed")
            continue
        found = torch.cat([log_probabilities(model, window, name) for window in text])
        kl, same = compare(expected, found)
        print(f"{name:<18}{kl:>12.5f}{same:>11.1%}")


if __name__ == "__main__":
    main()
