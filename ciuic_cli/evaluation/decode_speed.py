"""The time of a decoding step behind contexts of several lengths, beside what the machine's memory allows.

A step reads every weight that the token needs once. Their bytes over the step's time, as a share of the memory's
measured bandwidth, say how far the step is from the machine's limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from ciuic_cli.checkpoint.config.numbers import experts_per_token
from ciuic_cli.integers import ceil_div

CONTEXTS = (128, 2048, 8192)
"""Contexts that are measured by default, as far as the model has positions: a question, a page, a long document."""

STEPS = 16
"""Measured steps per context, after two that are not counted; their median is reported. The spread between runs of 16
was below 3 % on a quiet machine with two cores."""

_BANDWIDTH_BYTES = 256 << 20
"""Bytes that are read to measure the bandwidth: larger than the caches of the machines that were looked at."""

_FILLED_FROM = 64
"""Tokens that the model computes before the cache is lengthened by copies of them."""


def active_bytes(model: nn.Module) -> int:
    """Bytes of the weights that one token reads.

    An embedding table counts only if it is the head, too. A stack of E experts, of which a token uses k, counts k / E.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    table = model.get_input_embeddings()  # type: ignore[operator]
    config: Any = model.config
    chosen = experts_per_token(config)
    seen: set[int] = set()
    total = 0.0
    for module in model.modules():
        is_tied = head is not None and head._parameters.get("weight") is table._parameters.get("weight")
        if module is table and not is_tied:
            continue
        experts = getattr(module, "num_experts", None) if hasattr(module, "gate_up_proj") else None
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                total += tensor.nbytes * (min(chosen, experts) / experts if experts else 1)
    return int(total)


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second at which torch reads a long tensor: the best of five sums."""
    values = torch.zeros(_BANDWIDTH_BYTES // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        values.sum().item()
        seconds.append(time.perf_counter() - started)
    return _BANDWIDTH_BYTES / min(seconds[1:])


def decode_at(
    model: Any,
    cache_keyword: str,
    contexts: Sequence[int],
    *,
    batch_size: int,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, float]]:
    """Decoding steps of one token for each sequence behind each context.

    The cache is filled by a short prompt and lengthened by copies of its entries, whose values do not change the time.
    Where the cache has layers of other kinds than a growing list (windows, states), the whole prompt is computed.

    Returns:
        For each context {"context": tokens, "ms_per_token": median time of a step}.
    """
    found = []
    device = model.device
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    for context in contexts:
        short = min(_FILLED_FROM, context)
        ids = torch.randint(0, vocabulary, (batch_size, context), generator=generator).to(device)
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :short], use_cache=True, logits_to_keep=1, **{cache_keyword: cache})
        if not _lengthen(cache, short, context):
            cache = DynamicCache(config=model.config)
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword: cache})
        seconds = []
        for step in range(STEPS + 2):
            started = time.perf_counter()
            logits = model(input_ids=ids[:, :1], use_cache=True, **{cache_keyword: cache}).logits
            logits[0, -1, 0].item()  # waits for a GPU
            if step > 1:
                seconds.append(time.perf_counter() - started)
        found.append({"context": context, "ms_per_token": 1e3 * statistics.median(seconds)})
        progress()
    return found


def _lengthen(cache: Any, length: int, wanted: int) -> bool:
    """Repeat a cache's entries from `length` to `wanted` tokens; False if it has another kind of layer."""
    tensors = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or hasattr(layer, "cumulative_length"):
            return False
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor) and value.numel():
                if value.dim() < 3 or value.shape[-2] != length:
                    return False
                tensors.append((layer, name, value))
    copies = ceil_div(wanted, length)
    for layer, name, value in tensors:
        repeated = value.repeat(*(1,) * (value.dim() - 2), copies, 1)
        setattr(layer, name, repeated[..., :wanted, :].contiguous())
    return bool(tensors) and cache.get_seq_length() == wanted
