"""The process in which `ciuic bench` measures one model: `python -m ciuic_cli.evaluation.bench_process REQUEST`.

REQUEST is the keyword arguments of `measure` as JSON. The process writes lines of JSON to stdout: {"progress": [done,
total]} while it works, then the figures or the error.
"""

from __future__ import annotations

import gc
import inspect
import itertools
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

from ciuic_cli.checkpoint.architecture import build_config, build_meta_model, config_faults
from ciuic_cli.checkpoint.config.numbers import max_positions
from ciuic_cli.checkpoint.folder import locate, read_config
from ciuic_cli.errors import CiuicError, EnvironmentFault, UsageError
from ciuic_cli.evaluation.bench import NEW_TOKENS, PROMPT_TOKENS
from ciuic_cli.evaluation.compiled_decode import compiled_decode
from ciuic_cli.evaluation.decode_speed import CONTEXTS, STEPS, active_bytes, decode_at, memory_bandwidth
from ciuic_cli.evaluation.opening import file_bytes, free_memory, open_model, require_runnable
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
    contexts: list[int] | None = None,
    compiled: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Memory and speed of one model in this process, which should be a fresh one.

    Args:
        path: an artifact or a checkpoint.
        prompt_tokens, new_tokens: None: see `fitted`.
        contexts: None: those of `decode_speed.CONTEXTS` that fit the model.
        compiled: also measure decoding by torch.compile.
        progress: called with the steps that are done, and all steps.

    Returns:
        prompt_tokens, new_tokens: the numbers that were used. file_bytes: of the safetensors files. weight_bytes:
        parameters and buffers in memory, shared ones once. load_seconds. rss_bytes: resident memory of the process with
        the model loaded; rss_growth_bytes: what loading added. peak_rss_bytes: the most resident memory so far;
        peak_growth_bytes: its growth since before loading. On a GPU also gpu_allocated_bytes, after
        loading, and gpu_peak_bytes, both as torch's allocator counts them.
        prefill, decode: tokens per second of all sequences of the batch together, as {"mean", "stdev"} over
        `repetitions` runs after one warm-up; stdev is None for a single run. Prefill: `prompt_tokens` random tokens
        into an empty cache, with the logits of the last token only. Decode: `new_tokens` greedy steps after that.
        contexts: as used. decode_at: for each context {"context", "ms_per_token", "bytes_per_second": active_bytes over
        the time of a step, "of_bandwidth": their share of bandwidth}. active_bytes: weights that one token reads.
        bandwidth: bytes per second at which this machine reads memory. With `compiled` also decode_compiled, as decode,
        and compile_seconds and same_tokens as of `compiled_decode`.

    Raises:
        InputError, UsageError, EnvironmentFault: as `bench`.
    """
    target = choose_device(device)
    folder = locate(path)
    require_runnable(folder, device)
    config = build_config(read_config(folder), folder / "config.json")
    positions = max_positions(config)
    prompt_tokens, new_tokens = fitted(prompt_tokens, new_tokens, positions)
    _require_positions(positions, prompt_tokens + new_tokens, folder)
    contexts = fitted_contexts(contexts, positions, folder)
    # Imports the model's code, so that its memory is not counted and transformers knows its kinds of cache layers.
    build_meta_model(config, torch.bfloat16, folder / "config.json")
    with config_faults(folder / "config.json"):
        longest = max([prompt_tokens + new_tokens, *(context + STEPS + 2 for context in contexts)])
        needed = token_bytes(config, prompt_tokens, longest - prompt_tokens, batch_size)
    _require_memory(needed, target)
    if target.type == "cuda":
        torch.cuda.init()
    _return_memory()
    before = resident_bytes()
    total = repetitions + 2 + len(contexts) + compiled
    progress(0, total)
    started = time.perf_counter()
    model = open_model(folder, device)
    _synchronize(target)
    load_seconds = time.perf_counter() - started
    progress(1, total)
    _return_memory()
    resident = resident_bytes()
    figures: dict[str, Any] = {
        "path": path,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "contexts": contexts,
        "device": torch.cuda.get_device_name(target) if target.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "file_bytes": file_bytes(folder),
        "weight_bytes": storage_bytes([*model.parameters(), *model.buffers()]),
        "rss_bytes": resident,
        "rss_growth_bytes": max(0, resident - before),
        "load_seconds": load_seconds,
    }
    if target.type == "cuda":
        figures["gpu_allocated_bytes"] = torch.cuda.memory_allocated(target)
    prefill, decode = [], []
    vocabulary = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for repetition in range(repetitions + 1):
            ids = torch.randint(0, vocabulary, (batch_size, prompt_tokens), generator=generator).to(target)
            with config_faults(folder / "config.json"):
                prefill_seconds, decode_seconds = _time_once(model, ids, new_tokens, target)
            if repetition:  # the first run is the warm-up
                prefill.append(batch_size * prompt_tokens / prefill_seconds)
                decode.append(batch_size * new_tokens / decode_seconds)
            progress(repetition + 2, total)
        done = itertools.count(repetitions + 3)
        with config_faults(folder / "config.json"):
            steps = decode_at(
                model,
                cache_keyword(model),
                contexts,
                batch_size=batch_size,
                progress=lambda: progress(next(done), total),
            )
        if compiled:
            steps_of = compiled_decode(model, cache_keyword(model), ids, new_tokens, repetitions)
            speeds = [batch_size * new_tokens / seconds for seconds in steps_of.pop("seconds")]
            figures |= {"decode_compiled": _mean_and_stdev(speeds), **steps_of}
            progress(total, total)
    # Before the bandwidth is measured, which takes more memory than a small model.
    figures["peak_rss_bytes"] = peak_resident_bytes()
    figures["peak_growth_bytes"] = max(0, figures["peak_rss_bytes"] - before)
    figures["active_bytes"] = active_bytes(model)
    figures["bandwidth"] = memory_bandwidth(target)
    for step in steps:
        step["bytes_per_second"] = 1e3 * figures["active_bytes"] / step["ms_per_token"]
        step["of_bandwidth"] = step["bytes_per_second"] / figures["bandwidth"]
    figures["decode_at"] = steps
    figures |= {"prefill": _mean_and_stdev(prefill), "decode": _mean_and_stdev(decode)}
    if target.type == "cuda":
        figures["gpu_peak_bytes"] = torch.cuda.max_memory_allocated(target)
    return figures


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind the tensors; a storage that several tensors share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _time_once(model: Any, ids: torch.Tensor, new_tokens: int, target: torch.device) -> tuple[float, float]:
    """Seconds for the prompt (batch, prompt_tokens), and for `new_tokens` greedy steps with the KV cache."""
    _synchronize(target)
    started = time.perf_counter()
    cache = {cache_keyword(model): DynamicCache(config=model.config)}
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache)
    _synchronize(target)
    middle = time.perf_counter()
    for _ in range(new_tokens):
        token = output.logits[:, -1:].argmax(-1)
        output = model(input_ids=token, use_cache=True, **cache)
    _synchronize(target)
    return middle - started, time.perf_counter() - middle


def cache_keyword(model: Any) -> str:
    """The keyword by which the model's forward takes its cache: transformers renamed it in version 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _synchronize(target: torch.device) -> None:
    if target.type == "cuda":
        torch.cuda.synchronize(target)


def _return_memory() -> None:
    """Return freed memory to the system, so that resident memory is memory in use."""
    gc.collect()
    return_freed_memory()


def fitted(prompt_tokens: int | None, new_tokens: int | None, positions: int | None) -> tuple[int, int]:
    """The numbers of tokens to measure with: as requested, else the defaults, reduced to the model's positions.

    If both are reduced, the prompt gets four fifths of the positions.
    """
    available = sys.maxsize if positions is None else positions
    if new_tokens is None:
        new_tokens = max(
            1, min(NEW_TOKENS, available // 5 if prompt_tokens is None else available - prompt_tokens)
        )
    if prompt_tokens is None:
        prompt_tokens = max(1, min(PROMPT_TOKENS, available - new_tokens))
    return prompt_tokens, new_tokens


def fitted_contexts(contexts: list[int] | None, positions: int | None, folder: Path) -> list[int]:
    """The contexts to measure at: as requested, else the defaults for which the model has positions.

    Raises:
        UsageError: the model has too few positions for a requested context.
    """
    available = sys.maxsize if positions is None else positions
    if contexts is None:
        return [context for context in CONTEXTS if context + STEPS + 2 <= available]
    longest = max(contexts, default=0) + STEPS + 2
    if longest > available:
        raise UsageError(
            f"a context of {max(contexts)} needs {longest} positions, the model has {positions}",
            file=folder,
            remedy="use a smaller -d",
        )
    return contexts


def _require_positions(positions: int | None, needed: int, folder: Path) -> None:
    if positions is not None and needed > positions:
        raise UsageError(
            f"-p and -n ask for {needed} tokens, the model has {positions} positions",
            file=folder,
            remedy="use a smaller -p or -n",
        )


def token_bytes(config: Any, prompt_tokens: int, new_tokens: int, batch_size: int) -> int:
    """A lower bound of the bytes that `measure` needs besides the weights.

    It counts token ids, one hidden state of the prompt, the last logits, and the attention layers' cache, all but the
    ids in 2 bytes. Multi-head latent attention caches at least the latent. The model's code must have been imported:
    some families have kinds of cache layers that transformers knows only then.
    """
    text = config.get_text_config()
    latent, heads = getattr(text, "kv_lora_rank", None), getattr(text, "num_attention_heads", 0)
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    tokens = prompt_tokens + new_tokens
    cached_tokens = sum(
        min(tokens, (getattr(layer, "sliding_window", None) or math.inf) - 1)
        for layer in DynamicCache(config=config).layers
        if isinstance(layer, DynamicLayer)
    )
    values = (
        prompt_tokens * text.hidden_size
        + text.vocab_size
        + (latent or 2 * key_value_heads * head_dim) * cached_tokens
    )
    return batch_size * (8 * prompt_tokens + 2 * int(values))


def _require_memory(needed: int, target: torch.device) -> None:
    free = free_memory(target)
    if needed > free:
        raise EnvironmentFault(
            f"the tokens of -p, -n and --batch-size take at least {needed / 1e9:.3g} GB besides the weights; "
            f"{free / 1e9:.3g} GB are free on {target}",
            remedy="use a smaller -p, -n or --batch-size",
        )


def _mean_and_stdev(values: list[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "stdev": statistics.stdev(values) if len(values) > 1 else None}


def main(request: str) -> None:
    """Answer one request. Other errors than `CiuicError` leave a traceback on stderr and no answer."""
    answer_to = reserve_stdout()

    def send(message: dict[str, Any]) -> None:
        os.write(answer_to, json.dumps(message).encode() + b"\n")

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        send(measure(**json.loads(request), progress=lambda done, total: send({"progress": [done, total]})))
    except BaseException as error:  # a panic of a Rust library is not an Exception
        fault = error if isinstance(error, CiuicError) else exhaustion(error)
        if fault is None:
            raise
        send(_error_message(fault))


def _error_message(error: CiuicError) -> dict[str, Any]:
    return {
        "error": error.message,
        "file": error.file,
        "tensor": error.tensor,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }


if __name__ == "__main__":
    main(sys.argv[1])
