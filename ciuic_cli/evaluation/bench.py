"""`ciuic bench`: memory and speed of a model and of its original, each measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError, UsageError
from ciuic_cli.process.progress import Progress, no_progress

PROMPT_TOKENS, NEW_TOKENS = 512, 128
"""Default numbers of tokens to measure with."""

_ERRORS_BY_EXIT_CODE = {error.exit_code: error for error in (UsageError, InputError, EnvironmentFault)}
_LESS_IS_BETTER = (
    "file_bytes",
    "weight_bytes",
    "rss_growth_bytes",
    "peak_growth_bytes",
    "peak_rss_bytes",
    "gpu_allocated_bytes",
    "gpu_peak_bytes",
)
_MORE_IS_BETTER = ("prefill", "decode", "decode_compiled")


def bench(
    path: str | Path,
    *,
    base: str | Path | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    contexts: Sequence[int] | None = None,
    repetitions: int = 5,
    batch_size: int = 1,
    device: str = "auto",
    compiled: bool = False,
    progress: Progress = no_progress,
    hint: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Measure a model, and its base when given, one after the other.

    Args:
        prompt_tokens, new_tokens: default: 512 and 128, reduced to the model's number of positions with a hint.
        contexts: tokens in the cache at which decoding steps are timed; default: those of `decode_speed.CONTEXTS` for
            which the model has positions.
        repetitions: timed runs after one warm-up.
        compiled: also measure decoding by torch.compile with a static KV cache.
        progress: its phases are "model" and "base".
        hint: gets messages about what differs from the request.

    Returns:
        {"options", "model", "base", "ratios"}, the last two only with a base. `bench_process.measure` describes the
        figures of "model" and "base". Ratios are base over model for bytes, and model over base for speeds: above 1 the
        model is better. If the base cannot be measured on this machine, it has only file_bytes and weight_bytes.

    Raises:
        InputError: a model cannot be opened.
        UsageError: the model has fewer positions than -p and -n need.
        EnvironmentFault: there is no such device, memory does not suffice for the model or for -p, -n and the batch, or
        the measuring process was killed. If this happens with the base, a hint says so instead.
    """
    options: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "contexts": None if contexts is None else list(contexts),
        "repetitions": repetitions,
        "batch_size": batch_size,
        "device": device,
        "compiled": compiled,
    }
    paths = {"model": path} if base is None else {"model": path, "base": base}
    results: dict[str, Any] = {"options": options}
    for label, folder in paths.items():
        try:
            results[label] = _in_own_process(folder, options, partial(progress, label))
        except EnvironmentFault as fault:
            if label == "model":
                raise
            hint(f"the original was not measured: {fault}")
            results[label] = _file_figures(folder)
        else:  # the first model settles the defaults, so that both are measured with the same numbers
            options |= {name: results[label][name] for name in ("prompt_tokens", "new_tokens", "contexts")}
    if (options["prompt_tokens"], options["new_tokens"]) != (
        prompt_tokens or PROMPT_TOKENS,
        new_tokens or NEW_TOKENS,
    ):
        hint(f"the model has positions for -p {options['prompt_tokens']} -n {options['new_tokens']}")
    if base is not None:
        _share_bandwidth(results["model"], results["base"])
        results["ratios"] = _ratios(results["model"], results["base"])
    return results


def _share_bandwidth(*models: dict[str, Any]) -> None:
    """Relate the steps of all models to the fastest reading that one of their processes measured: it is one machine."""
    measured = [figures for figures in models if "bandwidth" in figures]
    fastest = max((figures["bandwidth"] for figures in measured), default=0.0)
    for figures in measured:
        figures["bandwidth"] = fastest
        for step in figures["decode_at"]:
            step["of_bandwidth"] = step["bytes_per_second"] / fastest


def _ratios(model: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    ratios = {key: base[key] / model[key] for key in _LESS_IS_BETTER if model.get(key) and key in base}
    speeds = {
        key: model[key]["mean"] / base[key]["mean"] for key in _MORE_IS_BETTER if key in base and key in model
    }
    return ratios | speeds


def _file_figures(path: str | Path) -> dict[str, Any]:
    """Figures of a model that is not loaded, from its files' headers."""
    from ciuic_cli.evaluation.opening import expected_bytes, file_bytes

    return {"file_bytes": file_bytes(path), "weight_bytes": expected_bytes(path, None)}


def _in_own_process(
    path: str | Path, options: dict[str, Any], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ciuic_cli.evaluation.bench_process",
                json.dumps({"path": str(path), **options}),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        try:
            answer = _listen(child.stdout, progress)
            code = child.wait()
        finally:
            child.kill()
            child.wait()
        if answer is None:
            raise _died(path, code, stderr)
    if "error" in answer:
        kind = _ERRORS_BY_EXIT_CODE.get(answer["exit_code"], CiuicError)
        raise kind(answer["error"], file=answer["file"], tensor=answer["tensor"], remedy=answer["remedy"])
    return answer


def _listen(stream: IO[str] | None, progress: Callable[[int, int], None]) -> dict[str, Any] | None:
    """The child's answer, None if it gave none; its lines of progress are passed on."""
    answer = None
    for line in stream or ():
        message: dict[str, Any] = json.loads(line)
        if "progress" in message:
            progress(*message["progress"])
        else:
            answer = message
    return answer


def _died(path: str | Path, code: int, stderr: IO[str]) -> CiuicError:
    """The error for a child that gave no answer: it was killed, or it failed by a bug."""
    stderr.seek(0)
    lines = stderr.read().strip().splitlines()
    last = lines[-1] if lines else "it wrote nothing to stderr"
    if code < 0:
        return EnvironmentFault(
            f"the measuring process was killed by signal {-code}: {last}",
            file=path,
            remedy="if memory was exhausted, try a smaller -p, -n or --batch-size",
        )
    return CiuicError(f"the measuring process failed with code {code}: {last}", file=path)
