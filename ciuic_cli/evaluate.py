"""`ciuic eval`: perplexity, and how far a compressed model's predictions are from the original's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ciuic_cli.checkpoint.folder import locate, read_config
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.inspection import is_artifact
from ciuic_cli.runtime.loading import choose_device, load
from ciuic_cli.statistics.calibration import beginning, read_text, tokenize

MINIMUM_TOKENS = 32
"""A last, partial window counts if it predicts at least so many tokens."""
BLOCK_TOKENS = 256
"""Positions whose whole-vocabulary distributions are compared at once."""

Progress = Callable[[str, int, int], None]


def open_model(path: str | Path, device: str = "auto") -> Any:
    """An artifact or a dense checkpoint as a transformers model in evaluation mode, in its own dtype."""
    folder = locate(path)
    if is_artifact(read_config(folder)):
        return load(folder, device=device)
    checkpoint = open_checkpoint(folder)
    if checkpoint.scales:
        raise InputError(
            "a checkpoint with FP8 or FP4 weights cannot be evaluated as it is",
            file=checkpoint.folder,
            remedy="evaluate the artifact alone, or give a bfloat16 copy of the original as --base",
        )
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype="auto", trust_remote_code=False)
    return model.eval().to(choose_device(device))


def open_tokenizer(path: str | Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(
            "the tokenizer cannot be loaded", file=path, remedy="copy tokenizer.json and tokenizer_config.json there"
        ) from error


def windows_of(text: str, tokenizer: Any, seqlen: int, limit: int | None) -> list[torch.Tensor]:
    """Consecutive windows of at most seqlen tokens, each with the tokenizer's own beginning (BOS)."""
    prefix = beginning(tokenizer)
    body = seqlen - len(prefix)
    if body < 2:
        raise UsageError(f"--seqlen {seqlen} leaves no room for text", remedy="use 128 or more")
    ids = tokenize(tokenizer, text)
    windows = [torch.tensor(prefix + ids[start : start + body]) for start in range(0, len(ids), body)]
    windows = [window for window in windows if len(window) > MINIMUM_TOKENS]
    if not windows:
        raise InputError(
            f"the text has {len(ids)} tokens; more than {MINIMUM_TOKENS} are needed", remedy="give a longer text"
        )
    return windows[:limit]


@dataclass
class _Sums:
    """Per-token figures of all windows."""

    nll: list[np.ndarray]
    base_nll: list[np.ndarray]
    kl: list[np.ndarray]
    same: list[np.ndarray]


@torch.no_grad()
def evaluate(
    path: str | Path,
    *,
    base: str | Path | None = None,
    text: str | Path | None = None,
    seqlen: int = 1024,
    limit: int | None = None,
    device: str = "auto",
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Perplexity of a model on a text; with `base`, also the KL divergence from it.

    Args:
        path: an artifact or a dense checkpoint. base: the original to compare with.
        text: UTF-8 file; None: the package's own evaluation text. limit: windows at most.

    Returns:
        perplexity; stderr, its standard error (delta method: perplexity times the standard error of the mean
        of the windows' mean negative log-likelihoods; of the tokens' when there is one window only); tokens; windows;
        with base: base_perplexity, perplexity_ratio, kl_mean, kl_median, kl_p99 (nats per token, KL(base || model)
        over the whole vocabulary), top1_agreement.

    Raises:
        InputError: unusable text or model, or vocabularies that differ.
    """
    content = read_text(Path(text)) if text else default_text()
    windows = windows_of(content, open_tokenizer(path), seqlen, limit)
    model = open_model(path, device)
    reference = None if base is None else open_model(base, device)
    if reference is not None and reference.config.vocab_size != model.config.vocab_size:
        raise InputError(
            f"the base has {reference.config.vocab_size} tokens, the model {model.config.vocab_size}",
            file=base,
            remedy="compare with the checkpoint that the artifact was made from",
        )
    sums = _Sums([], [], [], [])
    for number, window in enumerate(windows):
        _add_window(sums, model, reference, window)
        progress("windows", number + 1, len(windows))
    return _figures(sums, windows)


def default_text() -> str:
    return resources.files("ciuic_cli").joinpath("data/eval.txt").read_text(encoding="utf-8")


def _add_window(sums: _Sums, model: Any, reference: Any, window: torch.Tensor) -> None:
    ids = window[None].to(model.device)
    targets = window[1:].to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    base_logits = None if reference is None else reference(input_ids=ids, use_cache=False).logits[0, :-1]
    rows: list[list[np.ndarray]] = [[], [], [], []]
    for start in range(0, len(targets), BLOCK_TOKENS):
        block = slice(start, start + BLOCK_TOKENS)
        log_q = logits[block].float().log_softmax(-1)
        target = targets[block, None]
        rows[0].append(_numpy(-log_q.gather(1, target)[:, 0]))
        if base_logits is not None:
            log_p = base_logits[block].float().log_softmax(-1)
            rows[1].append(_numpy(-log_p.gather(1, target)[:, 0]))
            rows[2].append(_numpy((log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)))
            rows[3].append(_numpy(log_p.argmax(-1) == log_q.argmax(-1)))
    sums.nll.append(np.concatenate(rows[0]))
    if base_logits is not None:
        sums.base_nll.append(np.concatenate(rows[1]))
        sums.kl.append(np.concatenate(rows[2]))
        sums.same.append(np.concatenate(rows[3]))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


def _figures(sums: _Sums, windows: list[torch.Tensor]) -> dict[str, Any]:
    nll = np.concatenate(sums.nll)
    perplexity = math.exp(nll.mean())
    samples = np.array([part.mean() for part in sums.nll]) if len(sums.nll) > 1 else nll
    found: dict[str, Any] = {
        "perplexity": perplexity,
        "stderr": perplexity * float(samples.std(ddof=1)) / math.sqrt(len(samples)),
        "tokens": int(nll.size),
        "windows": len(windows),
        "seqlen": max(len(window) for window in windows),
    }
    if sums.kl:
        kl = np.concatenate(sums.kl)
        base_perplexity = math.exp(np.concatenate(sums.base_nll).mean())
        found |= {
            "base_perplexity": base_perplexity,
            "perplexity_ratio": perplexity / base_perplexity,
            "kl_mean": float(kl.mean()),
            "kl_median": float(np.median(kl)),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "top1_agreement": float(np.concatenate(sums.same).mean()),
        }
    return found


@torch.no_grad()
def generate_text(path: str | Path, prompt: str, *, device: str = "auto", max_new_tokens: int = 64) -> str:
    """What a model says after `prompt`, greedily; prompt included."""
    tokenizer = open_tokenizer(path)
    model = open_model(path, device)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
    )  # fmt: skip
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
