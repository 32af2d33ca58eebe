"""What `evaluate` reports beside the means: standard errors, windows at their limits, and losses beyond any float."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ciuic_cli.evaluation.perplexity as evaluating
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import UsageError
from ciuic_cli.evaluation.opening import expected_bytes
from ciuic_cli.evaluation.perplexity import evaluate, generate_text, windows_of
from ciuic_cli.text.tokenizer import tokenize

SEQLEN = 100


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def other(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A model of the same size with other random weights."""
    return tiny_checkpoint("llama", seed=1)


def log_probabilities(folder: Path, windows: list[torch.Tensor]) -> list[np.ndarray]:
    """Of each window: float64 (tokens, vocabulary), without torch's softmax."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(window[None]).logits[0, :-1].double().numpy() for window in windows]
    return [values - np.logaddexp.reduce(values, axis=1, keepdims=True) for values in logits]


def jackknife(windows: list[np.ndarray]) -> float:
    """Standard error of the mean over all tokens when whole windows are left out one at a time."""
    count = len(windows)
    means = np.array(
        [np.concatenate([*windows[:left], *windows[left + 1 :]]).mean() for left in range(count)]
    )
    return math.sqrt((count - 1) / count * float(((means - means.mean()) ** 2).sum()))


def test_standard_errors_are_those_of_a_jackknife_over_windows(base: Path, other: Path, text: Path) -> None:
    found = evaluate(other, base=base, text=text, seqlen=SEQLEN, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(base)
    windows = windows_of(text.read_text(), tokenizer, SEQLEN, None)
    assert found["stderr_samples"] == "windows" and len(windows) == found["windows"] == 12
    base_nll, difference, divergence = [], [], []
    for window, p, q in zip(
        windows, log_probabilities(base, windows), log_probabilities(other, windows), strict=True
    ):
        target = np.arange(len(window) - 1), window[1:].numpy()
        base_nll.append(-p[target])
        difference.append(p[target] - q[target])
        divergence.append((np.exp(p) * (p - q)).sum(1))
    # The jackknife and the delta method differ only because the last window is shorter.
    expected = {
        "base_stderr": found["base_perplexity"] * jackknife(base_nll),
        "perplexity_ratio_stderr": found["perplexity_ratio"] * jackknife(difference),
        "kl_stderr": jackknife(divergence),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=0.03)
    assert found["perplexity_ratio"] == pytest.approx(math.exp(np.concatenate(difference).mean()), rel=1e-5)


def test_a_last_window_counts_if_it_predicts_32_tokens(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    for length in range(SEQLEN + 25, SEQLEN + 40):
        text = "a" * length
        rest = len(tokenize(tokenizer, text)) - (SEQLEN - 1)  # after a first window with its BOS token
        windows = windows_of(text, tokenizer, SEQLEN, None)
        assert [len(window) for window in windows] == ([SEQLEN, rest + 1] if rest >= 32 else [SEQLEN])


def test_no_more_windows_than_the_limit(base: Path, text: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    every = windows_of(text.read_text(), tokenizer, SEQLEN, None)
    for limit in (1, 5, 12, 100):
        first = windows_of(text.read_text(), tokenizer, SEQLEN, limit)
        assert len(first) == min(limit, 12)
        assert all(torch.equal(one, same) for one, same in zip(first, every, strict=False))


def test_windows_fit_the_model_with_fewer_positions(
    base: Path, tiny_checkpoint: Callable[..., Path], text: Path
) -> None:
    short = tiny_checkpoint("llama", max_position_embeddings=128)
    for path, reference in ((base, short), (short, base)):
        found = evaluate(path, base=reference, text=text, seqlen=1024, limit=1, device="cpu")
        assert found["seqlen"] == 128


def test_a_loss_beyond_the_largest_float_is_an_infinite_perplexity(
    base: Path, text: Path, tmp_path: Path
) -> None:
    ruined = Path(shutil.copytree(base, tmp_path / "m"))
    tensors: dict[str, Any] = load_file(ruined / "model.safetensors")
    tensors["lm_head.weight"] *= 1e4
    save_file(tensors, ruined / "model.safetensors", metadata={"format": "pt"})
    found = evaluate(ruined, base=base, text=text, seqlen=SEQLEN, limit=2, device="cpu")
    assert found["perplexity"] == found["perplexity_ratio"] == math.inf
    assert 709 < found["kl_mean"] < math.inf


def test_a_prompt_and_its_continuation_must_fit_the_positions(base: Path) -> None:
    """256 positions; the prompt's 240 characters are 241 tokens."""
    prompt = "The mill" * 30
    assert generate_text(base, prompt, device="cpu", max_new_tokens=15).startswith(prompt)
    with pytest.raises(UsageError, match="257 tokens, the model has 256 positions"):
        generate_text(base, prompt, device="cpu", max_new_tokens=16)


@pytest.mark.parametrize(("missing", "streams"), [(0, False), (2, True)])
def test_a_checkpoint_runs_from_its_files_if_it_takes_more_than_half_of_the_free_memory(
    base: Path, text: Path, monkeypatch: pytest.MonkeyPatch, missing: int, streams: bool
) -> None:
    free = 2 * expected_bytes(base, torch.float32) - missing
    monkeypatch.setattr(evaluating, "free_memory", lambda place: free)
    hints: list[str] = []
    found = evaluate(base, text=text, seqlen=SEQLEN, limit=1, device="cpu", hint=hints.append)
    assert found["dtype"] == "float32"
    assert ["layer by layer" in hint for hint in hints] == [True] * streams


def test_an_artifact_computes_as_it_is_stored_if_float32_takes_more_than_half_of_the_free_memory(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    compress(
        base, out, ratio=3.0, calibration=[text], calibration_only=True, nsamples=4, seqlen=64, effort="fast"
    )
    needed = expected_bytes(out, torch.float32)
    for free, dtype in ((2 * needed, "float32"), (2 * needed - 2, "bfloat16")):
        monkeypatch.setattr(evaluating, "free_memory", lambda place, free=free: free)
        found = evaluate(out, text=text, seqlen=SEQLEN, limit=1, device="cpu")
        assert found["dtype"] == dtype
