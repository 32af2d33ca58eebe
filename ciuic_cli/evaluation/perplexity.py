"""`ciuic eval`: perplexity, and how far a compressed model's predictions are from the original's."""

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
from ciuic_cli.checkpoint.architecture import build_config, config_faults, max_positions
from ciuic_cli.checkpoint.folder import locate, read_config
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.evaluation.estimates import Floats, mean_of
from ciuic_cli.evaluation.logits import Predict, loaded, streamed
from ciuic_cli.evaluation.opening import expected_bytes, free_memory, open_model
from ciuic_cli.layerwise.layer_stream import compute_dtype
from ciuic_cli.process.memory import configure_allocators
from ciuic_cli.runtime.loading import choose_device
from ciuic_cli.text.documents import builtin_evaluation_text, read_text
from ciuic_cli.text.tokenizer import (
    leading_special_tokens,
    open_tokenizer,
    require_known_tokens,
    tokenize,
    tokenizer_faults,
)

MINIMUM_TOKENS = 32
"""A last, partial window counts if it predicts at least so many tokens."""
OWN_TEXT = "ciuic's own text"
BLOCK_BYTES = 32 << 20
"""Bytes of one float64 block (positions x vocabulary); a few of them exist at a time."""

Progress = Callable[[str, int, int], None]


def windows_of(
    text: str, tokenizer: Any, seqlen: int, limit: int | None, file: str | Path | None = None
) -> list[torch.Tensor]:
    """Consecutive windows of at most seqlen tokens, each with the tokenizer's own beginning (BOS).

    Returns LongTensors (length,). They do not overlap; a rest that predicts fewer than MINIMUM_TOKENS is left
    out. Raises InputError, naming the text's `file`, if no window remains, UsageError if seqlen is too small.
    """
    prefix = leading_special_tokens(tokenizer)
    body = seqlen - len(prefix)
    if body < 2:
        raise UsageError(f"--seqlen {seqlen} leaves no room for text", remedy="use 128 or more")
    ids = tokenize(tokenizer, text)
    windows = [torch.tensor(prefix + ids[start : start + body]) for start in range(0, len(ids), body)]
    windows = [window for window in windows if len(window) > MINIMUM_TOKENS]
    if not windows:
        raise InputError(
            f"the text has {len(ids)} tokens; more than {MINIMUM_TOKENS} are needed",
            file=file,
            remedy="give a longer text",
        )
    return windows[:limit]


def token_figures(
    logits: torch.Tensor, base_logits: torch.Tensor | None, targets: torch.Tensor
) -> dict[str, Floats]:
    """Figures of each predicted token, in float64 over the whole vocabulary, block by block.

    Args:
        logits: (tokens, vocabulary) of the model. base_logits: the same of the original, or None.
        targets: (tokens,) the tokens that followed.

    Returns:
        nll: negative log-likelihood in nats; with base_logits also base_nll, kl = KL(base || model) in nats,
        and same: 1.0 where both find the same token most likely.
    """
    rows = max(1, BLOCK_BYTES // (8 * logits.shape[-1]))
    found: dict[str, list[Floats]] = {}

    def keep(name: str, values: torch.Tensor) -> None:
        found.setdefault(name, []).append(values.double().cpu().numpy())

    for start in range(0, len(targets), rows):
        block = slice(start, start + rows)
        target = targets[block, None]
        log_q = logits[block].double().log_softmax(-1)
        keep("nll", -log_q.gather(1, target)[:, 0])
        if base_logits is not None:
            log_p = base_logits[block].to(log_q.device).double().log_softmax(-1)
            keep("base_nll", -log_p.gather(1, target)[:, 0])
            keep("same", log_p.argmax(-1) == log_q.argmax(-1))
            keep("kl", (log_p.exp() * (log_p - log_q)).sum(-1))
    return {name: np.concatenate(blocks) for name, blocks in found.items()}


@torch.inference_mode()
def evaluate(
    path: str | Path,
    *,
    base: str | Path | None = None,
    text: str | Path | None = None,
    seqlen: int = 1024,
    limit: int | None = None,
    device: str = "auto",
    progress: Progress = lambda what, done, total: None,
    hint: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Perplexity of a model on a text; with `base`, also the KL divergence from it.

    On a CPU the models compute in float32: two bfloat16 computations of the same model differ by a KL divergence of
    about 0.001, which is no damage done by compression. On a GPU they compute as they are stored. A checkpoint that
    does not fit into memory so (on a CPU, into half of what is free) runs layer by layer, from its files; an artifact
    that does not computes as it is stored.

    Args:
        path: an artifact or a checkpoint. base: the original to compare with.
        text: UTF-8 file; None: the package's own evaluation text. limit: windows at most.
        seqlen: tokens per window, BOS included; less where the model has fewer positions.

    Returns:
        perplexity; stderr, its standard error by the delta method: perplexity times the standard error of the
        mean negative log-likelihood, whose samples are the windows (`stderr_samples`; the tokens if there
        are fewer than MINIMUM_CLUSTERS windows); tokens (predicted ones); windows; text, its name; seqlen; dtype;
        with base: base_perplexity, base_stderr, perplexity_ratio and its perplexity_ratio_stderr (from paired
        differences), kl_mean with its kl_stderr, kl_median, kl_p99 (nats per token, KL(base || model) over the
        whole vocabulary), top1_agreement.

    Raises:
        InputError: unusable text or model, vocabularies that differ, predictions that are not finite.
        EnvironmentFault: the device or the memory is not there.
    """
    configure_allocators()
    folders = [locate(folder) for folder in (path, base) if folder is not None]
    content = read_text(Path(text)) if text is not None else builtin_evaluation_text()
    configs = [build_config(read_config(folder), folder / "config.json") for folder in folders]
    positions = min((found for config in configs if (found := max_positions(config))), default=seqlen)
    if positions < seqlen:
        hint(f"windows of {positions:,} tokens instead of {seqlen:,}: the model has no more positions")
        seqlen = positions
    tokenizer = open_tokenizer(folders[0])
    windows = windows_of(content, tokenizer, seqlen, limit, text)
    highest = (int(window.max()) for window in windows)
    require_known_tokens(tokenizer, highest, configs[0].get_text_config().vocab_size)
    with ExitStack() as opened:
        (predict, dtype), *reference = [
            opened.enter_context(_predicting(folder, windows, device, progress, hint)) for folder in folders
        ]
        sums = []
        for number, window in enumerate(windows):
            base_parts = reference[0][0](number) if reference else itertools.repeat(None)
            sums.append(_figures(window, predict(number), base_parts, folders))
            if not all(np.isfinite(values).all() for values in sums[-1].values()):
                raise InputError(
                    f"predictions that are not finite, in window {number}",
                    file=folders[0],
                    remedy="the weights are damaged: check them with `ciuic inspect --verify`",
                )
            progress("windows", number + 1, len(windows))
    return _summary(sums) | {
        "text": OWN_TEXT if text is None else str(text),
        "seqlen": max(map(len, windows)),
        "dtype": dtype,
    }


@torch.inference_mode()
def generate_text(path: str | Path, prompt: str, *, device: str = "auto", max_new_tokens: int = 64) -> str:
    """What a model says after `prompt`, greedily; prompt included.

    Raises UsageError if the model has fewer positions than that takes.
    """
    from transformers import GenerationConfig

    tokenizer = open_tokenizer(path)
    model = open_model(path, device)
    with tokenizer_faults(tokenizer.name_or_path):
        found = tokenizer(prompt)["input_ids"]
    require_known_tokens(tokenizer, found, model.config.get_text_config().vocab_size)
    positions, needed = max_positions(model.config), len(found) + max_new_tokens
    if positions is not None and needed > positions:
        raise UsageError(
            f"the prompt and what is to follow take {needed:,} tokens, the model has {positions:,} positions",
            file=path,
            remedy="shorten the prompt",
        )
    ids = torch.tensor([found], device=model.device)
    own = model.generation_config
    # In the model's own place: generate() fills in from there what a given configuration leaves open, and the
    # penalties that a checkpoint asks for would not be greedy.
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=next(
            (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0
        ),
    )
    with config_faults(locate(path) / "config.json"):
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    with tokenizer_faults(tokenizer.name_or_path):
        return str(tokenizer.decode(output[0], skip_special_tokens=True))


@contextmanager
def _predicting(
    folder: Path,
    windows: Sequence[torch.Tensor],
    device: str,
    progress: Progress,
    hint: Callable[[str], None],
) -> Iterator[tuple[Predict, str]]:
    """A model's predictions in the windows, and what it computes in; in memory, if there is room for it now."""
    place = choose_device(device)
    on_cpu = place.type == "cpu"
    dtype = torch.float32 if on_cpu else None
    free = free_memory(place) // (2 if on_cpu else 1)
    needed = expected_bytes(folder, dtype)
    if is_artifact(read_config(folder)):
        if on_cpu and needed > free:
            dtype = None
    elif needed > free:
        hint(
            f"{folder}: the weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free for them: "
            "it runs layer by layer, from its files"
        )
        with streamed(folder, windows, place, dtype or compute_dtype(place), progress) as predict:
            yield predict, "float32" if on_cpu else "bfloat16"
        return
    model = open_model(folder, device, dtype)
    yield loaded(model, windows, folder / "config.json"), str(model.dtype).removeprefix("torch.")


def _figures(
    window: torch.Tensor,
    parts: Iterator[torch.Tensor],
    base_parts: Iterator[torch.Tensor | None],
    folders: Sequence[Path],
) -> dict[str, Floats]:
    """Those of all predicted tokens of a window."""
    found: list[dict[str, Floats]] = []
    place = 1
    for logits, base_logits in zip(parts, base_parts, strict=False):
        if base_logits is not None and base_logits.shape != logits.shape:
            raise InputError(
                f"the base predicts {base_logits.shape[-1]} tokens, the model {logits.shape[-1]}",
                file=folders[1],
                remedy="compare with the checkpoint that the artifact was made from",
            )
        targets = window[place : place + len(logits)].to(logits.device)
        found.append(token_figures(logits, base_logits, targets))
        place += len(logits)
        del logits, base_logits  # before the next ones
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


def _summary(sums: list[dict[str, Floats]]) -> dict[str, Any]:
    nll = mean_of([part["nll"] for part in sums])
    perplexity = _exp(nll.value)
    found: dict[str, Any] = {
        "perplexity": perplexity,
        "stderr": perplexity * nll.stderr,
        "stderr_samples": nll.samples,
        "tokens": sum(part["nll"].size for part in sums),
        "windows": len(sums),
    }
    if "kl" not in sums[0]:
        return found
    base_nll = mean_of([part["base_nll"] for part in sums])
    difference = mean_of([part["nll"] - part["base_nll"] for part in sums])
    divergence = mean_of([part["kl"] for part in sums])
    kl = np.concatenate([part["kl"] for part in sums])
    ratio = _exp(difference.value)
    return found | {
        "base_perplexity": _exp(base_nll.value),
        "base_stderr": _exp(base_nll.value) * base_nll.stderr,
        "perplexity_ratio": ratio,
        "perplexity_ratio_stderr": ratio * difference.stderr,
        "kl_mean": max(0.0, divergence.value),
        "kl_stderr": divergence.stderr,
        "kl_median": max(0.0, float(np.median(kl))),
        "kl_p99": max(0.0, float(np.quantile(kl, 0.99))),
        "top1_agreement": float(np.concatenate([part["same"] for part in sums]).mean()),
    }


def _exp(value: float) -> float:
    """e to the value; infinity where a ruined model's loss is beyond the range."""
    return math.exp(value) if value < 709.0 else math.inf
