"""The process in which `ciuic bench` measures one model: `python -m ciuic_cli.evaluation.bench_process REQUEST`.

REQUEST is the keyword arguments of `measure` as JSON. Lines of JSON go to stdout: {"progress": [done, total]}
while it works, then the figures or the error.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ciuic_cli.checkpoint.architecture import (
    build_config,
    build_meta_model,
    config_faults,
    max_positions,
)
from ciuic_cli.checkpoint.folder import locate, read_config
from ciuic_cli.errors import CiuicError, EnvironmentFault, UsageError
from ciuic_cli.evaluation.bench import NEW_TOKENS, PROMPT_TOKENS
from ciuic_cli.evaluation.opening import file_bytes, free_memory, open_model
from ciuic_cli.process.memory import exhaustion, peak_resident_bytes, resident_bytes, return_freed_memory
from ciuic_cli.process.streams import reserve_stdout
from ciuic_cli.runtime.loading import choose_device


def measure(
    path: str,
    prompt_tokens: int | None,
    new_tokens: int | None,
    repetitions: int,
    batch_size: int,
    device: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Memory and speed of one model, in this process, which should be a fresh one.

    Returns:
        prompt_tokens, new_tokens: as asked for or settled. file_bytes: of the safetensors files. weight_bytes:
        parameters and buffers in memory, shared ones once. rss_bytes: of the process with the model loaded;
        rss_growth_bytes: what loading added to it; peak_rss_bytes: the most the process ever had, loading and
        running; peak_growth_bytes: that without what it had before loading. On a GPU also gpu_allocated_bytes,
        after loading, and gpu_peak_bytes, both from the allocator. load_seconds. prefill and decode: tokens/s as
        {"mean", "stdev"}, all sequences of the batch together, over `repetitions` after one warm-up (of a single
        one stdev is None). prefill: `prompt_tokens` random tokens into an empty cache, the logits of the last
        only. decode: `new_tokens` greedy steps after it.
    """
    place = choose_device(device)
    folder = locate(path)
    config = build_config(read_config(folder), folder / "config.json")
    positions = max_positions(config)
    prompt_tokens, new_tokens = fitted(prompt_tokens, new_tokens, positions)
    _require_positions(positions, prompt_tokens + new_tokens, folder)
    # Its code is in memory before we count, and has made its kinds of cache known to transformers.
    build_meta_model(config, torch.bfloat16, folder / "config.json")
    with config_faults(folder / "config.json"):
        needed = token_bytes(config, prompt_tokens, new_tokens, batch_size)
    _require_memory(needed, place)
    if place.type == "cuda":
        torch.cuda.init()
    _settle()
    before = resident_bytes()
    total = repetitions + 2
    progress(0, total)
    started = time.perf_counter()
    model = open_model(folder, device)
    _synchronize(place)
    load_seconds = time.perf_counter() - started
    progress(1, total)
    _settle()
    resident = resident_bytes()
    figures: dict[str, Any] = {
        "path": path,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "file_bytes": file_bytes(folder),
        "weight_bytes": storage_bytes([*model.parameters(), *model.buffers()]),
        "rss_bytes": resident,
        "rss_growth_bytes": max(0, resident - before),
        "load_seconds": load_seconds,
    }
    if place.type == "cuda":
        figures["gpu_allocated_bytes"] = torch.cuda.memory_allocated(place)
    prefill, decode = [], []
    vocabulary = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for repetition in range(repetitions + 1):
            ids = torch.randint(0, vocabulary, (batch_size, prompt_tokens), generator=generator).to(place)
            with config_faults(folder / "config.json"):
                first, rest = _time_once(model, ids, new_tokens, place)
            if repetition:  # the first one warms up
                prefill.append(batch_size * prompt_tokens / first)
                decode.append(batch_size * new_tokens / rest)
            progress(repetition + 2, total)
    figures |= {"prefill": _spread(prefill), "decode": _spread(decode)}
    figures["peak_rss_bytes"] = peak_resident_bytes()
    figures["peak_growth_bytes"] = max(0, figures["peak_rss_bytes"] - before)
    if place.type == "cuda":
        figures["gpu_peak_bytes"] = torch.cuda.max_memory_allocated(place)
    return figures


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind the tensors, each storage once, however many tensors share it."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _time_once(model: Any, ids: torch.Tensor, new_tokens: int, place: torch.device) -> tuple[float, float]:
    """Seconds for the prompt, and for `new_tokens` greedy steps with the KV cache."""
    _synchronize(place)
    started = time.perf_counter()
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    _synchronize(place)
    middle = time.perf_counter()
    for _ in range(new_tokens):
        token = output.logits[:, -1:].argmax(-1)
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    _synchronize(place)
    return middle - started, time.perf_counter() - middle


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _settle() -> None:
    """Give freed memory back to the system, so that what is resident is what is in use."""
    gc.collect()
    return_freed_memory()


def fitted(prompt_tokens: int | None, new_tokens: int | None, positions: int | None) -> tuple[int, int]:
    """The numbers to measure with: those asked for, else the usual ones, as far as the model has positions."""
    most = sys.maxsize if positions is None else positions
    if new_tokens is None:
        new_tokens = max(1, min(NEW_TOKENS, most // 5 if prompt_tokens is None else most - prompt_tokens))
    if prompt_tokens is None:
        prompt_tokens = max(1, min(PROMPT_TOKENS, most - new_tokens))
    return prompt_tokens, new_tokens


def _require_positions(positions: int | None, needed: int, folder: Path) -> None:
    if positions is not None and needed > positions:
        raise UsageError(
            f"-p and -n ask for {needed} tokens, the model has {positions} positions",
            file=folder,
            remedy="use a smaller -p or -n",
        )


def token_bytes(config: Any, prompt_tokens: int, new_tokens: int, batch_size: int) -> int:
    """At least so many bytes are taken, besides the weights, by what `measure` runs the model on.

    Token ids, one hidden state of the prompt, the last logits, and the cache: what its attention layers keep of a
    token, numbers of 2 bytes. Multi-head latent attention keeps the latent at least. The model's own code has to be
    imported: some families have kinds of cache layers that transformers knows only then.
    """
    text = config.get_text_config()
    latent, heads = getattr(text, "kv_lora_rank", None), getattr(text, "num_attention_heads", 0)
    pairs = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    tokens = prompt_tokens + new_tokens
    cached = sum(
        min(tokens, (getattr(layer, "sliding_window", None) or math.inf) - 1)
        for layer in DynamicCache(config=config).layers
        if isinstance(layer, DynamicLayer)
    )
    numbers = prompt_tokens * text.hidden_size + text.vocab_size + (latent or 2 * pairs * width) * cached
    return batch_size * (8 * prompt_tokens + 2 * int(numbers))


def _require_memory(needed: int, place: torch.device) -> None:
    free = free_memory(place)
    if needed > free:
        raise EnvironmentFault(
            f"the tokens of -p, -n and --batch-size take at least {needed / 1e9:.3g} GB besides the weights; "
            f"{free / 1e9:.3g} GB are free on {place}",
            remedy="use a smaller -p, -n or --batch-size",
        )


def _spread(values: list[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "stdev": statistics.stdev(values) if len(values) > 1 else None}


def main(request: str) -> None:
    """Answer one request; anything but our own errors leaves a traceback on stderr and no answer."""
    answer_to = reserve_stdout()

    def say(message: dict[str, Any]) -> None:
        os.write(answer_to, json.dumps(message).encode() + b"\n")

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        say(measure(**json.loads(request), progress=lambda done, total: say({"progress": [done, total]})))
    except BaseException as error:  # a panic of a Rust library is no Exception
        fault = error if isinstance(error, CiuicError) else exhaustion(error)
        if fault is None:
            raise
        say(_told(fault))


def _told(error: CiuicError) -> dict[str, Any]:
    return {
        "error": error.message,
        "file": error.file,
        "tensor": error.tensor,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }


if __name__ == "__main__":
    main(sys.argv[1])
