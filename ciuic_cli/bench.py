"""`ciuic bench`: memory and speed of a model and of its original, each in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError, UsageError
from ciuic_cli.memory import peak_resident_bytes, resident_bytes

Progress = Callable[[str, int, int], None]


def bench(
    path: str | Path,
    *,
    base: str | Path | None = None,
    prompt_tokens: int = 512,
    new_tokens: int = 128,
    repetitions: int = 5,
    batch_size: int = 1,
    device: str = "auto",
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Measure a model, and its base when given.

    Returns:
        {"model": figures, "base": figures, "ratios": base over model for memory, model over base for speed}; figures:
        file_bytes, weight_bytes (parameters and buffers, shared ones once), rss_bytes (of the process after loading),
        rss_growth_bytes (by loading), peak_rss_bytes, on a GPU also gpu_allocated_bytes and gpu_peak_bytes,
        load_seconds, and prefill and decode in tokens/s as {"mean", "stdev"} over the repetitions after one warm-up.
    """
    options = {
        "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "repetitions": repetitions,
        "batch_size": batch_size, "device": device,
    }  # fmt: skip
    paths = {"model": path} if base is None else {"model": path, "base": base}
    found: dict[str, Any] = {"options": options}
    for number, (label, folder) in enumerate(paths.items()):
        found[label] = _in_own_process(folder, options)
        progress("models", number + 1, len(paths))
    if base is not None:
        model, original = found["model"], found["base"]
        found["ratios"] = {
            key: original[key] / model[key]
            for key in ("file_bytes", "weight_bytes", "rss_growth_bytes", "peak_rss_bytes", "gpu_peak_bytes")
            if model.get(key)
        } | {key: model[key]["mean"] / original[key]["mean"] for key in ("prefill", "decode")}
    return found


def _in_own_process(path: str | Path, options: dict[str, Any]) -> dict[str, Any]:
    request = json.dumps({"path": str(path), **options})
    child = subprocess.run(
        [sys.executable, "-m", "ciuic_cli.bench"], input=request, capture_output=True, text=True, check=False
    )
    try:
        answer = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise EnvironmentFault(
            f"the measuring process ended with code {child.returncode}: {last}",
            file=path,
            remedy="is there memory enough? try a smaller -p, -n or --batch-size",
        ) from error
    if "error" in answer:
        kinds = {2: UsageError, 3: InputError, 5: EnvironmentFault}
        kind = kinds.get(answer.pop("exit_code"), CiuicError)
        raise kind(answer["error"], file=answer["file"], tensor=answer["tensor"], remedy=answer["remedy"])
    return dict(answer)


def measure(
    path: str, prompt_tokens: int, new_tokens: int, repetitions: int, batch_size: int, device: str
) -> dict[str, Any]:
    """The figures of one model, in this process."""
    import torch

    from ciuic_cli.evaluate import open_model

    before = resident_bytes()
    started = time.perf_counter()
    model = open_model(path, device)
    load_seconds = time.perf_counter() - started
    tensors = {t.data_ptr(): t for t in [*model.parameters(), *model.buffers()]}
    figures: dict[str, Any] = {
        "path": path,
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "file_bytes": sum(file.stat().st_size for file in Path(path).glob("*.safetensors")),
        "weight_bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
        "rss_bytes": resident_bytes(),
        "rss_growth_bytes": max(0, resident_bytes() - before),
        "load_seconds": load_seconds,
    }
    prefill, decode = [], []
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for repetition in range(repetitions + 1):
            ids = torch.randint(0, model.config.vocab_size, (batch_size, prompt_tokens), generator=generator)
            first, rest = _time_once(model, ids.to(model.device), new_tokens)
            if repetition:  # the first one warms up
                prefill.append(batch_size * prompt_tokens / first)
                decode.append(batch_size * new_tokens / rest)
    figures["prefill"] = _spread(prefill)
    figures["decode"] = _spread(decode)
    figures["peak_rss_bytes"] = peak_resident_bytes()
    if model.device.type == "cuda":
        figures["gpu_allocated_bytes"] = torch.cuda.memory_allocated(model.device)
        figures["gpu_peak_bytes"] = torch.cuda.max_memory_allocated(model.device)
    return figures


def _time_once(model: Any, ids: Any, new_tokens: int) -> tuple[float, float]:
    """Seconds for the prompt, and for `new_tokens` greedy steps with the KV cache."""
    started = _now(model)
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    middle = _now(model)
    for _ in range(new_tokens):
        token = output.logits[:, -1:].argmax(-1)
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return middle - started, _now(model) - middle


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        import torch

        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "stdev": statistics.stdev(values) if len(values) > 1 else 0.0}


def _serve() -> None:
    """The child process: a request on stdin, the figures (or the error) as one JSON line on stdout."""
    request = json.loads(sys.stdin.read())
    answer_to = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answer
    try:
        answer = measure(**request)
    except CiuicError as error:
        answer = {
            "error": error.message, "file": error.file, "tensor": error.tensor, "remedy": error.remedy,
            "exit_code": error.exit_code,
        }  # fmt: skip
    os.write(answer_to, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    _serve()
