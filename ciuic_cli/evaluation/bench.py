"""`ciuic bench`: memory and speed of a model and of its original, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError, UsageError

Progress = Callable[[str, int, int], None]
PROMPT_TOKENS, NEW_TOKENS = 512, 128
"""Measured where nothing else is asked for."""

_ERRORS = {error.exit_code: error for error in (UsageError, InputError, EnvironmentFault)}
_LESS_IS_BETTER = (
    "file_bytes",
    "weight_bytes",
    "rss_growth_bytes",
    "peak_growth_bytes",
    "peak_rss_bytes",
    "gpu_allocated_bytes",
    "gpu_peak_bytes",
)
_MORE_IS_BETTER = ("prefill", "decode")


def bench(
    path: str | Path,
    *,
    base: str | Path | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    repetitions: int = 5,
    batch_size: int = 1,
    device: str = "auto",
    progress: Progress = lambda what, done, total: None,
    hint: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Measure a model, and its base when given, one after the other.

    Args:
        prompt_tokens, new_tokens: None: 512 and 128, or as many as the model has positions for, which is said.

    Returns:
        {"options", "model": figures, "base": figures, "ratios"}: figures as `benching.measure` describes them;
        ratios are base over model for bytes and model over base for speeds: above 1 the model is better. Of a base
        that the machine has no room for, file_bytes and weight_bytes alone.

    Raises:
        InputError: a model that cannot be opened.
        UsageError: the model has fewer positions than -p and -n need.
        EnvironmentFault: no such device, memory exhausted or too small for -p, -n and the batch, a measuring process
        that was killed; of the base it is said instead.
    """
    options: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repetitions": repetitions,
        "batch_size": batch_size,
        "device": device,
    }
    paths = {"model": path} if base is None else {"model": path, "base": base}
    found: dict[str, Any] = {"options": options}
    for label, folder in paths.items():
        try:
            found[label] = _in_own_process(folder, options, partial(progress, label))
        except EnvironmentFault as fault:
            if label == "model":
                raise
            hint(f"the original was not measured: {fault}")
            found[label] = _by_its_files(folder)
        else:  # both are measured alike: what was left open is settled by the first
            options |= {name: found[label][name] for name in ("prompt_tokens", "new_tokens")}
    if (options["prompt_tokens"], options["new_tokens"]) != (
        prompt_tokens or PROMPT_TOKENS,
        new_tokens or NEW_TOKENS,
    ):
        hint(f"the model has positions for -p {options['prompt_tokens']} -n {options['new_tokens']}")
    if base is not None:
        found["ratios"] = _ratios(found["model"], found["base"])
    return found


def _ratios(model: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    ratios = {key: base[key] / model[key] for key in _LESS_IS_BETTER if model.get(key) and key in base}
    speeds = {key: model[key]["mean"] / base[key]["mean"] for key in _MORE_IS_BETTER if key in base}
    return ratios | speeds


def _by_its_files(path: str | Path) -> dict[str, Any]:
    """What is known of a model that is not loaded."""
    from ciuic_cli.evaluation.opening import expected_bytes, file_bytes

    return {"file_bytes": file_bytes(path), "weight_bytes": expected_bytes(path, None)}


def _in_own_process(
    path: str | Path, options: dict[str, Any], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ciuic_cli.evaluation.bench_process",
                json.dumps({"path": str(path), **options}),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        try:
            answer = _listen(child.stdout, progress)
            code = child.wait()
        finally:
            child.kill()
            child.wait()
        if answer is None:
            raise _died(path, code, said)
    if "error" in answer:
        kind = _ERRORS.get(answer["exit_code"], CiuicError)
        raise kind(answer["error"], file=answer["file"], tensor=answer["tensor"], remedy=answer["remedy"])
    return answer


def _listen(stream: IO[str] | None, progress: Callable[[int, int], None]) -> dict[str, Any] | None:
    """The child's last line that is an answer; its lines of progress are passed on."""
    answer = None
    for line in stream or ():
        message: dict[str, Any] = json.loads(line)
        if "progress" in message:
            progress(*message["progress"])
        else:
            answer = message
    return answer


def _died(path: str | Path, code: int, said: IO[str]) -> CiuicError:
    """What to raise for a child that gave no answer: killed from outside, or a bug of ours in it."""
    said.seek(0)
    lines = said.read().strip().splitlines()
    last = lines[-1] if lines else "it said nothing"
    if code < 0:
        return EnvironmentFault(
            f"the measuring process was killed by signal {-code}: {last}",
            file=path,
            remedy="if memory was exhausted, try a smaller -p, -n or --batch-size",
        )
    return CiuicError(f"the measuring process failed with code {code}: {last}", file=path)
