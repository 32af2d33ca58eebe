"""Predictions of a span: our kernel beside torch's operations, on every instruction set, and its exact cases."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from ciuic_cli.codecs import native
from ciuic_cli.errors import UsageError
from ciuic_cli.statistics.predictions import Predictions


def _predictions(tokens: int, vocabulary: int, dtype: torch.dtype, *, slopes: bool) -> Predictions:
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    logits = (4.0 * torch.randn(tokens, vocabulary, generator=generator)).to(dtype)
    slope = torch.rand(tokens, vocabulary, generator=generator) if slopes else None
    draws = torch.rand(tokens, 1, generator=generator)
    return Predictions(logits, slope, draws, torch.rand(tokens, generator=generator) * 100)


def _both(
    predictions: Predictions, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Sums, weights, gradient and token weights of the kernel and of torch."""
    results = []
    for add in (predictions.add_to, predictions._torch):
        sums, weights = (
            torch.ones(4, predictions.logits.shape[1]),
            torch.empty_like(predictions.logits, dtype=dtype),
        )
        results.append((sums, weights, *add(sums, weights)))
    return results


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("vocabulary", [1, 15, 255, 257, 2049, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slopes", [False, True])
def test_the_kernel_equals_torchs_operations(
    tokens: int, vocabulary: int, dtype: torch.dtype, slopes: bool
) -> None:
    (sums, weights, gradient, of_tokens), expected = _both(
        _predictions(tokens, vocabulary, dtype, slopes=slopes), dtype
    )
    rounding = 1e-4 if dtype == torch.float32 else 1e-2  # 1 - p has few digits where p is nearly 1
    torch.testing.assert_close(sums, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected[1], rtol=rounding, atol=1e-6)
    torch.testing.assert_close(of_tokens, expected[3], rtol=1e-4, atol=1e-6)
    # Labels may differ where a draw falls on the boundary of two; no other gradient differs.
    same = ((gradient < 0) == (expected[2] < 0)).all(1)
    assert int((~same).sum()) <= 1
    # Without AVX-512, torch's softmax of 40,000 logits is off by 1.2e-5 of float64's, the kernel by 2e-7.
    torch.testing.assert_close(gradient[same], expected[2][same], rtol=rounding, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_another_dtype(dtype: torch.dtype) -> None:
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    (_, weights, *_), expected = _both(_predictions(5, 300, dtype, slopes=False), other)
    assert weights.dtype == other
    torch.testing.assert_close(weights, expected[1], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_logits_of_other_dtypes(dtype: torch.dtype) -> None:
    predictions = _predictions(5, 300, torch.float32, slopes=True)
    other = Predictions(
        predictions.logits.to(dtype), predictions.slope, predictions.draws, predictions.squares
    )
    sums, other_sums, weights = torch.zeros(4, 300), torch.zeros(4, 300), torch.empty(5, 300)
    gradient, of_tokens = predictions.add_to(sums, weights)
    found, found_of_tokens = other.add_to(other_sums, torch.empty(5, 300))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), gradient, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(other_sums, sums, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(found_of_tokens, of_tokens, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_may_overwrite_the_logits(dtype: torch.dtype) -> None:
    predictions = _predictions(7, 2049, dtype, slopes=False)
    expected, _ = predictions.add_to(torch.zeros(4, 2049), torch.empty(7, 2049))
    assert not torch.equal(predictions.logits, expected)
    found, _ = predictions.add_to(torch.zeros(4, 2049), torch.empty(7, 2049), overwrite=True)
    assert torch.equal(found, expected) and torch.equal(predictions.logits, expected)


def test_labels_are_drawn_with_the_probability_of_the_prediction() -> None:
    """A grid of draws gives each label as often as its probability says, also across the parts of a long row."""
    tokens, vocabulary = 2_000, 70_000
    logits = torch.full((1, vocabulary), -12.0)
    likely = {0: 0.1, 255: 0.2, 256: 0.15, 40_000: 0.3, vocabulary - 1: 0.25}
    for label, share in likely.items():
        logits[0, label] = torch.tensor(share * 50).log()
    draws = ((torch.arange(tokens) + 0.5) / tokens)[:, None]
    found = torch.zeros(vocabulary)
    for part in draws.split(100):
        count = len(part)
        gradient, _ = Predictions(logits.expand(count, -1), None, part, torch.ones(count)).add_to(
            torch.zeros(4, vocabulary), torch.empty(count, vocabulary)
        )
        found += (gradient < 0).sum(0)
    shares = found / tokens
    probability = logits[0].softmax(0)
    for label in likely:
        assert float(shares[label]) == pytest.approx(float(probability[label]), abs=2 / tokens)


@pytest.mark.parametrize("draw", [0.0, 1.0 - 2.0**-24])
def test_the_ends_of_the_draws(draw: float) -> None:
    logits = torch.tensor([[-200.0, 3.0, 1.0, -200.0]])
    predictions = Predictions(logits, None, torch.tensor([[draw]]), torch.ones(1))
    sums, weights = torch.zeros(4, 4), torch.empty(1, 4)
    for gradient, _ in (predictions.add_to(sums, weights), predictions._torch(sums, weights)):
        assert gradient.argmin().item() == (1 if draw == 0.0 else 2)


@pytest.mark.parametrize("fault", ["tokens", "vocabulary", "logits", "draws", "squares"])
def test_a_call_without_tokens_or_arrays_is_refused(fault: str) -> None:
    arrays = [torch.zeros(8) for _ in range(7)]
    call = native.CiuicPredictions(
        arrays[0].data_ptr(), None, arrays[1].data_ptr(), arrays[2].data_ptr(), 2, 4, 0, 0
    )
    setattr(call, fault, 0)
    status = native.interface().ciuic_predictions(
        ctypes.byref(call), *(each.data_ptr() for each in arrays[3:]), 1
    )
    with pytest.raises(UsageError, match="out of range"):
        native.check(status, "adding predictions")


SCRIPT = """
import hashlib, torch
from tests.statistics.test_predictions import _predictions
digest = hashlib.sha256()
for threads in (1, 3):
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        predictions = _predictions(9, 5000, dtype, slopes=True)
        sums, weights = torch.zeros(4, 5000), torch.empty(9, 5000, dtype=dtype)
        for result in (*predictions.add_to(sums, weights), sums, weights):
            digest.update(result.view(torch.uint8).numpy().tobytes())
    print(digest.hexdigest())
    digest = hashlib.sha256()
"""


def test_the_bytes_depend_neither_on_threads_nor_on_the_instruction_set() -> None:
    found = set()
    for kernels in ("portable", "avx2", "avx512vnni"):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "CIUIC_CPU_KERNELS": kernels},
            capture_output=True,
            text=True,
            check=True,
        )
        found.update(run.stdout.split())
    assert len(found) == 1
