"""Perplexity, KL divergence and windows against computations that do not use the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_predictions import changed_copy, dense, expected_windows, log_probabilities
from transformers import AutoTokenizer

import ciuic_cli
from ciuic_cli.errors import UsageError
from ciuic_cli.evaluation import perplexity as module
from ciuic_cli.evaluation.estimates import mean_of
from ciuic_cli.evaluation.perplexity import evaluate, token_metrics, windows_of


def test_perplexity_equals_an_independent_computation(
    tiny_checkpoint: Callable[..., Path], text: Path
) -> None:
    folder = tiny_checkpoint("llama")
    windows = expected_windows(folder, text, 100)
    model = dense(folder)
    nll = np.concatenate(
        [-log_probabilities(model, w)[np.arange(len(w) - 1), w[1:].numpy()] for w in windows]
    )
    found = evaluate(folder, text=text, seqlen=100, device="cpu")
    assert found["tokens"] == nll.size == len(text.read_text()) + 2
    assert found["windows"] == len(windows) == 12
    assert found["perplexity"] == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert found["seqlen"] == 100
    assert "kl_mean" not in found


def test_stderr_follows_from_the_mean_log_likelihood(
    tiny_checkpoint: Callable[..., Path], text: Path
) -> None:
    folder = tiny_checkpoint("llama")
    found = evaluate(folder, text=text, seqlen=100, device="cpu")
    model = dense(folder)
    parts = [
        -log_probabilities(model, w)[np.arange(len(w) - 1), w[1:].numpy()]
        for w in expected_windows(folder, text, 100)
    ]
    assert found["stderr_samples"] == "windows"
    assert found["stderr"] == pytest.approx(found["perplexity"] * mean_of(parts).stderr, rel=1e-4)


def test_divergence_of_a_model_from_itself_is_zero(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    folder = tiny_checkpoint("llama")
    found = evaluate(folder, base=folder, text=text, seqlen=64, limit=2, device="cpu")
    assert found["kl_mean"] == found["kl_median"] == found["kl_p99"] == 0.0
    assert found["top1_agreement"] == 1.0
    assert found["perplexity_ratio"] == 1.0
    assert found["perplexity_ratio_stderr"] == 0.0
    assert found["base_perplexity"] == found["perplexity"]


@pytest.fixture(scope="module")
def pair(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `evaluate` returns for a model with noise in its weights, and each token's metrics without the package."""

    def perturb(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                noise = 0.1 * tensor.float().std() * torch.randn(tensor.shape, generator=generator)
                tensors[name] = tensor + noise.to(tensor.dtype)

    base = tiny_checkpoint("llama")
    other = changed_copy(base, tmp_path_factory.mktemp("noisy") / "m", perturb)
    metrics: dict[str, list[np.ndarray]] = {"kl": [], "same": [], "difference": []}
    first, second = dense(base), dense(other)
    for window in expected_windows(base, text, 100):
        p, q = log_probabilities(first, window), log_probabilities(second, window)
        target = (np.arange(len(window) - 1), window[1:].numpy())
        metrics["kl"].append((np.exp(p) * (p - q)).sum(1))
        metrics["same"].append(p.argmax(1) == q.argmax(1))
        metrics["difference"].append(p[target] - q[target])
    found = evaluate(other, base=base, text=text, seqlen=100, device="cpu")
    return found, {name: np.concatenate(parts) for name, parts in metrics.items()}


def test_divergence_equals_an_independent_computation(
    pair: tuple[dict[str, Any], dict[str, np.ndarray]],
) -> None:
    found, metrics = pair
    assert 0.001 < metrics["kl"].mean() < 1.0
    assert found["kl_mean"] == pytest.approx(metrics["kl"].mean(), abs=1e-6)
    assert found["kl_median"] == pytest.approx(np.median(metrics["kl"]), abs=1e-6)
    assert found["kl_p99"] == pytest.approx(np.quantile(metrics["kl"], 0.99), abs=1e-6)
    assert found["top1_agreement"] == metrics["same"].mean()
    assert 0.2 < found["top1_agreement"] < 0.8


def test_the_perplexity_ratio_follows_from_paired_differences(
    pair: tuple[dict[str, Any], dict[str, np.ndarray]],
) -> None:
    found, metrics = pair
    assert found["perplexity_ratio"] == pytest.approx(math.exp(metrics["difference"].mean()), rel=1e-6)
    assert found["perplexity_ratio"] == pytest.approx(
        found["perplexity"] / found["base_perplexity"], rel=1e-9
    )


def test_divergence_is_that_of_the_base_from_the_model() -> None:
    # KL(p || q) of p = (3/4, 1/4) and q = (1/2, 1/2) is ln 2 - H(p); the other direction is not.
    p, q = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    found = token_metrics(q, p, torch.tensor([1]))
    assert found["kl"][0] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-7)
    assert found["nll"][0] == pytest.approx(math.log(2), abs=1e-7)
    assert found["base_nll"][0] == pytest.approx(math.log(4), abs=1e-7)


def test_blocks_do_not_change_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 50, 301, generator=generator) * 4
    targets = torch.randint(0, 301, (50,), generator=generator)
    whole = token_metrics(logits[0], logits[1], targets)
    monkeypatch.setattr(module, "BLOCK_BYTES", 7 * 301 * 8)
    blocks = token_metrics(logits[0], logits[1], targets)
    assert {name: part.shape for name, part in blocks.items()} == dict.fromkeys(whole, (50,))
    for name, values in whole.items():
        np.testing.assert_allclose(blocks[name], values, rtol=1e-12)


def test_the_artifact_is_measured_as_it_is_loaded(artifact: tuple[Path, Path], text: Path) -> None:
    original, out = artifact
    first, second = dense(original), ciuic_cli.load(out, device="cpu", dtype=torch.float32)
    divergences = []
    for window in expected_windows(original, text, 64)[:3]:
        p, q = log_probabilities(first, window), log_probabilities(second, window)
        divergences.append((np.exp(p) * (p - q)).sum(1))
    found = evaluate(out, base=original, text=text, seqlen=64, limit=3, device="cpu")
    assert found["tokens"] == 3 * 63
    assert found["dtype"] == "float32"
    assert found["kl_mean"] == pytest.approx(np.concatenate(divergences).mean(), abs=1e-6)
    assert 1e-5 < found["kl_mean"] < 1.0


def test_windows_begin_with_bos_and_cover_the_text(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("llama"))
    found = windows_of(text.read_text(), tokenizer, 100, None)
    expected = expected_windows(tiny_checkpoint("llama"), text, 100)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_windows_are_limited_to_the_positions_with_a_hint(
    tiny_checkpoint: Callable[..., Path], text: Path
) -> None:
    hints: list[str] = []
    folder = tiny_checkpoint("llama")
    found = evaluate(folder, text=text, seqlen=1024, limit=1, device="cpu", hint=hints.append)
    assert found["seqlen"] == 256
    assert hints == ["windows of 256 tokens instead of 1,024: the model has no more positions"]
    evaluate(folder, text=text, seqlen=256, limit=1, device="cpu", hint=hints.append)
    assert len(hints) == 1


def test_a_seqlen_without_room_for_text_is_refused(tiny_checkpoint: Callable[..., Path], text: Path) -> None:
    with pytest.raises(UsageError, match="windows of 2 tokens leave no room"):
        evaluate(tiny_checkpoint("llama"), text=text, seqlen=2)
