"""`ciuic eval`: perplexity of a model, and the KL divergence of its predictions from the original's.

The text is cut into windows (`windows_of`), the models predict each window (`logits.py`), every predicted token gets
its metrics (`token_metrics`), and means with standard errors are the result (`_summary`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.checkpoint.architecture import build_config, config_faults
from ciuic_cli.checkpoint.config.numbers import max_positions
from ciuic_cli.checkpoint.folder import locate, read_config
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.evaluation.divergence import kl_divergence
from ciuic_cli.evaluation.estimates import Floats, mean_of
from ciuic_cli.evaluation.logits import PredictWindow, loaded, streamed
from ciuic_cli.evaluation.opening import expected_bytes, free_memory, open_model, require_runnable
from ciuic_cli.layerwise.operations.mixed_precision import compute_dtype
from ciuic_cli.process.memory import configure_allocators
from ciuic_cli.process.progress import Progress, no_progress
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.text.documents import builtin_evaluation_text
from ciuic_cli.text.records import read_text_or_records
from ciuic_cli.text.tokenizer import (
    leading_special_tokens,
    open_tokenizer,
    require_known_tokens,
    tokenize,
    tokenizer_faults,
)

MIN_WINDOW_TOKENS = 32
"""A partial window counts if it predicts at least this many tokens."""
OWN_TEXT = "the package's own evaluation text"
"""Name of the package's evaluation text in results."""
_COMPARED_TOKENS = 4096
"""Tokens of the text by which two tokenizers are compared. Chosen, not tuned."""
BLOCK_BYTES = 32 << 20
"""Bytes of one float64 block (tokens, vocabulary), of which a few exist at a time. No measurement is on record."""


@torch.inference_mode()
def evaluate(
    path: str | Path,
    *,
    base: str | Path | None = None,
    text: str | Path | None = None,
    seqlen: int = 1024,
    limit: int | None = None,
    device: str = "auto",
    progress: Progress = no_progress,
    hint: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Perplexity of a model on a text; with `base`, also the KL divergence from it.

    On a CPU the models compute in float32: two bfloat16 computations of the same model differ by a KL divergence of
    about 0.001, which would look like damage by compression. On a GPU they compute in the dtype in which they are
    stored. If a checkpoint does not fit into memory (on a CPU: into half of the free memory), it runs layer by layer
    from its files. If an artifact does not fit in float32, it computes in its own dtype.

    Args:
        path: an artifact or a checkpoint.
        base: the original to compare with.
        text: UTF-8 file; default: the package's own evaluation text.
        seqlen: tokens per window, BOS included; reduced to the model's number of positions.
        limit: windows at most; default: all.
        hint: gets messages about what differs from the request.

    Returns:
        perplexity; stderr, its standard error by the delta method: perplexity times the standard error of the mean
        negative log-likelihood; stderr_samples, "windows" or "tokens" (see `mean_of`); tokens, the number of predicted
        tokens; windows, their number; text, its name; seqlen; dtype.
        With base also base_perplexity and base_stderr; perplexity_ratio and perplexity_ratio_stderr, from paired
        differences; kl_mean, kl_stderr, kl_median and kl_p99, KL(base || model) over the whole vocabulary in nats per
        token; top1_agreement, the share of tokens where both models find the same token most likely.

    Raises:
        InputError: the text or a model is unusable, the vocabularies differ, or predictions are not finite.
        EnvironmentFault: the device is absent, or memory does not suffice.
    """
    configure_allocators()
    folders = [locate(folder) for folder in (path, base) if folder is not None]
    for folder in folders:
        require_runnable(folder, device)
    configs = [build_config(read_config(folder), folder / "config.json") for folder in folders]
    positions = min((count for config in configs if (count := max_positions(config))), default=seqlen)
    if positions < seqlen:
        hint(f"windows of {positions:,} tokens instead of {seqlen:,}: the model has no more positions")
        seqlen = positions
    vocabularies = [config.get_text_config().vocab_size for config in configs]
    if len(set(vocabularies)) > 1:
        raise _other_vocabulary(folders[1], vocabularies[1], vocabularies[0])
    tokenizer = open_tokenizer(folders[0])
    content = builtin_evaluation_text() if text is None else read_text_or_records(Path(text), tokenizer)
    if base is not None and not _same_tokens(tokenizer, folders[1], content):
        hint(
            f"warning: the tokenizer of {folders[1]} gives other tokens for this text than that of {folders[0]}: the "
            "comparison means little unless both models were trained with the same tokenizer"
        )
    windows = windows_of(content, tokenizer, seqlen, limit, text)
    highest = (int(window.max()) for window in windows)
    require_known_tokens(tokenizer, highest, configs[0].get_text_config().vocab_size)
    with ExitStack() as opened:
        (predict, dtype), *reference = [
            opened.enter_context(_predicting(folder, windows, device, progress, hint)) for folder in folders
        ]
        metrics = []
        for number, window in enumerate(windows):
            base_parts = reference[0][0](number) if reference else itertools.repeat(None)
            metrics.append(_window_metrics(window, predict(number), base_parts, folders))
            if not all(np.isfinite(values).all() for values in metrics[-1].values()):
                raise InputError(
                    f"predictions that are not finite, in window {number}",
                    file=folders[0],
                    remedy="the weights are damaged: check them with `ciuic inspect --verify`",
                )
            progress("windows", number + 1, len(windows))
    return _summary(metrics) | {
        "text": OWN_TEXT if text is None else str(text),
        "seqlen": max(map(len, windows)),
        "dtype": dtype,
    }


def _other_vocabulary(base: Path, base_tokens: int, tokens: int) -> InputError:
    return InputError(
        f"the vocabularies differ: the base predicts {base_tokens} tokens, the model {tokens}",
        file=base,
        remedy="compare with the checkpoint that the artifact was made from",
    )


def _same_tokens(tokenizer: Any, base: Path, text: str) -> bool:
    """Whether the base's tokenizer gives the same tokens for the beginning of the text; True if it has none."""
    try:
        other = open_tokenizer(base)
    except InputError:  # the base needs none: its predictions are for the tokens of the first tokenizer
        return True
    return tokenize(other, text, _COMPARED_TOKENS) == tokenize(tokenizer, text, _COMPARED_TOKENS)


def windows_of(
    text: str, tokenizer: Any, seqlen: int, limit: int | None, file: str | Path | None = None
) -> list[torch.Tensor]:
    """Consecutive windows of at most `seqlen` tokens without overlap, each begun as the tokenizer begins a text (BOS).

    Args:
        limit: windows at most; None: all.
        file: of the text, for messages.

    Returns:
        LongTensors (length,). A remainder that predicts fewer than MIN_WINDOW_TOKENS tokens is left out.

    Raises:
        InputError: the text is too short for one window.
        UsageError: `seqlen` is too small.
    """
    leading = leading_special_tokens(tokenizer)
    body = seqlen - len(leading)
    if body < 2:
        raise UsageError(
            f"windows of {seqlen} tokens leave no room for text",
            remedy="use --seqlen 128 or more; the model needs as many positions",
        )
    ids = tokenize(tokenizer, text, None if limit is None else limit * body)
    windows = [torch.tensor([*leading, *ids[start : start + body]]) for start in range(0, len(ids), body)]
    windows = [window for window in windows if len(window) > MIN_WINDOW_TOKENS]
    if not windows:
        raise InputError(
            f"the text has {len(ids)} tokens; more than {MIN_WINDOW_TOKENS} are needed",
            file=file,
            remedy="give a longer text",
        )
    return windows[:limit]


@contextmanager
def _predicting(
    folder: Path,
    windows: Sequence[torch.Tensor],
    device: str,
    progress: Progress,
    hint: Callable[[str], None],
) -> Iterator[tuple[PredictWindow, str]]:
    """A model's predictions for the windows, and its dtype; in memory if the model fits now, else from its files."""
    target = choose_device(device)
    on_cpu = target.type == "cpu"
    dtype = torch.float32 if on_cpu else None
    free = free_memory(target) // (2 if on_cpu else 1)
    needed = expected_bytes(folder, dtype)
    if is_artifact(read_config(folder)):
        if on_cpu and needed > free:
            dtype = None
    elif needed > free:
        hint(
            f"{folder}: the weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free for them; "
            "the model runs layer by layer from its files"
        )
        with streamed(folder, windows, target, dtype or compute_dtype(target), progress) as predict:
            yield predict, "float32" if on_cpu else "bfloat16"
        return
    model = open_model(folder, device, dtype)
    yield loaded(model, windows, folder / "config.json"), str(model.dtype).removeprefix("torch.")


def _window_metrics(
    window: torch.Tensor,
    parts: Iterator[torch.Tensor],
    base_parts: Iterator[torch.Tensor | None],
    folders: Sequence[Path],
) -> dict[str, Floats]:
    """Metrics of all predicted tokens of a window, from the logits of the model and of the base, part by part."""
    metrics: list[dict[str, Floats]] = []
    begin = 1  # nothing predicts the first token
    for logits, base_logits in zip(parts, base_parts, strict=False):
        if base_logits is not None and base_logits.shape != logits.shape:
            raise _other_vocabulary(folders[1], base_logits.shape[-1], logits.shape[-1])
        targets = window[begin : begin + len(logits)].to(logits.device)
        metrics.append(token_metrics(logits, base_logits, targets))
        begin += len(logits)
        del logits, base_logits  # frees them before the next ones are made
    return {name: np.concatenate([part[name] for part in metrics]) for name in metrics[0]}


def token_metrics(
    logits: torch.Tensor, base_logits: torch.Tensor | None, targets: torch.Tensor
) -> dict[str, Floats]:
    """Metrics of each predicted token, in float64 over the whole vocabulary, block by block.

    Args:
        logits: (tokens, vocabulary) of the model, in any float dtype.
        base_logits: the same of the original, or None.
        targets: LongTensor (tokens,), the tokens to predict.

    Returns:
        Arrays (tokens,): nll, the negative log-likelihood in nats; with base_logits also base_nll, kl = KL(base ||
        model) in nats, and same, which is 1.0 where both models find the same token most likely.
    """
    rows = max(1, BLOCK_BYTES // (8 * logits.shape[-1]))
    metrics: dict[str, list[Floats]] = {}

    def keep(name: str, values: torch.Tensor) -> None:
        metrics.setdefault(name, []).append(values.double().cpu().numpy())

    for start in range(0, len(targets), rows):
        block = slice(start, start + rows)
        target = targets[block, None]
        log_q = logits[block].double().log_softmax(-1)
        keep("nll", -log_q.gather(1, target)[:, 0])
        if base_logits is not None:
            log_p = base_logits[block].to(log_q.device).double().log_softmax(-1)
            keep("base_nll", -log_p.gather(1, target)[:, 0])
            keep("same", log_p.argmax(-1) == log_q.argmax(-1))
            keep("kl", kl_divergence(log_p, log_q))
    return {name: np.concatenate(blocks) for name, blocks in metrics.items()}


def _summary(windows: list[dict[str, Floats]]) -> dict[str, Any]:
    """The numbers that `evaluate` returns, from the metrics of each window."""
    nll = mean_of([window["nll"] for window in windows])
    perplexity = _exp(nll.value)
    summary: dict[str, Any] = {
        "perplexity": perplexity,
        "stderr": perplexity * nll.stderr,
        "stderr_samples": nll.samples,
        "tokens": sum(window["nll"].size for window in windows),
        "windows": len(windows),
    }
    if "kl" not in windows[0]:
        return summary
    base_nll = mean_of([window["base_nll"] for window in windows])
    difference = mean_of([window["nll"] - window["base_nll"] for window in windows])
    divergence = mean_of([window["kl"] for window in windows])
    kl = np.concatenate([window["kl"] for window in windows])
    ratio = _exp(difference.value)
    return summary | {
        "base_perplexity": _exp(base_nll.value),
        "base_stderr": _exp(base_nll.value) * base_nll.stderr,
        "perplexity_ratio": ratio,
        "perplexity_ratio_stderr": ratio * difference.stderr,
        "kl_mean": max(0.0, divergence.value),
        "kl_stderr": divergence.stderr,
        "kl_median": max(0.0, float(np.median(kl))),
        "kl_p99": max(0.0, float(np.quantile(kl, 0.99))),
        "top1_agreement": float(np.concatenate([window["same"] for window in windows]).mean()),
    }


def _exp(value: float) -> float:
    """e to the value; infinity where a damaged model's loss is beyond the range of float64."""
    return math.exp(value) if value < 709.0 else math.inf


@torch.inference_mode()
def generate_text(path: str | Path, prompt: str, *, device: str = "auto", max_new_tokens: int = 64) -> str:
    """The prompt with the model's greedy continuation of at most `max_new_tokens` tokens.

    Raises UsageError if the model has fewer positions than both need.
    """
    from transformers import GenerationConfig

    tokenizer = open_tokenizer(path)
    model = open_model(path, device)
    with tokenizer_faults(tokenizer.name_or_path):
        prompt_ids = tokenizer(prompt)["input_ids"]
    require_known_tokens(tokenizer, prompt_ids, model.config.get_text_config().vocab_size)
    positions, needed = max_positions(model.config), len(prompt_ids) + max_new_tokens
    if positions is not None and needed > positions:
        raise UsageError(
            f"prompt and continuation need {needed:,} tokens, the model has {positions:,} positions",
            file=path,
            remedy="shorten the prompt",
        )
    ids = torch.tensor([prompt_ids], device=model.device)
    checkpoint_config = model.generation_config
    # Replaces the model's own configuration: generate() completes a configuration that it is given from the model's
    # own, and with the penalties that a checkpoint may ask for the continuation would not be greedy.
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        bos_token_id=checkpoint_config.bos_token_id,
        eos_token_id=checkpoint_config.eos_token_id,
        pad_token_id=next(
            (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0
        ),
    )
    with config_faults(locate(path) / "config.json"):
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    with tokenizer_faults(tokenizer.name_or_path):
        return str(tokenizer.decode(output[0], skip_special_tokens=True))
