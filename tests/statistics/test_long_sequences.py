"""Long sequences: tokens are paired within stretches of 32, and whole batches give the sums of their sequences."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.layerwise.linear_hooks import Product, WatchedLinear
from ciuic_cli.statistics.moments import TALL_OUTPUT_PARTS, Moments
from ciuic_cli.statistics.recorder import MomentRecorder

ROWS, COLS = 6, 9
STRETCH = 32
KEY = ("model.layers.0.mlp.up_proj.weight", None)


def tokens(sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (sequences, length, COLS) and gradients (sequences, length, ROWS) with a common direction."""
    generator = torch.Generator().manual_seed(length)
    x = 1.0 + torch.randn(sequences, length, COLS, generator=generator)
    return x, 0.5 + torch.randn(sequences, length, ROWS, generator=generator)


def recorded(x: torch.Tensor, gradient: torch.Tensor) -> Moments:
    recorder = MomentRecorder([], torch.float32, x.shape[1])
    weight = torch.zeros(ROWS, COLS)
    product = Product(KEY, weight.shape, slice(0, ROWS), weight, x, gradient)
    recorder.watch(product)(gradient)
    return recorder.moments[KEY]


def assert_equal(first: Moments, second: Moments) -> None:
    torch.testing.assert_close(first.inputs.tril(), second.inputs.tril(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(first.outputs.tril(), second.outputs.tril(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(first.roots.sort().values, second.roots.sort().values)
    for name in ("trace", "tokens"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-4), name


@pytest.mark.parametrize("length", [STRETCH - 12, STRETCH, STRETCH + 100, 2 * STRETCH + 7])
def test_tokens_of_one_stretch_are_paired_and_no_others(length: int) -> None:
    x, gradient = tokens(2, length)
    found = recorded(x, gradient)
    expected = Moments.zeros(ROWS, COLS, x.device, torch.float32, full_outputs=True)
    for begin in range(0, length, STRETCH):
        stretch = slice(begin, begin + STRETCH)
        expected.add_sequences(x[:, stretch], gradient[:, stretch])
    assert_equal(found, expected)
    assert found.tokens == 2 * length
    if length > STRETCH:
        whole = Moments.zeros(ROWS, COLS, x.device, torch.float32, full_outputs=True)
        whole.add_sequences(x, gradient)
        assert whole.trace > 1.2 * found.trace, "pairs across stretches would count much here"


def test_a_batch_is_the_sum_of_its_sequences() -> None:
    x, gradient = tokens(3, 50)
    together = recorded(x, gradient)
    total = recorded(x[:1], gradient[:1])
    for number in (1, 2):
        total.include(recorded(x[number : number + 1], gradient[number : number + 1]))
    assert_equal(together, total)


def test_g_of_a_tall_matrix_is_summed_over_every_fourth_part() -> None:
    """Scaled to the trace of the whole sum. H, and G of other matrices, have all parts."""
    x, gradient = tokens(2, 5 * STRETCH + 7)
    weight = torch.zeros(ROWS, 4)
    recorder = MomentRecorder([], torch.float32, x.shape[1])
    narrow = x[..., :4].contiguous()
    recorder.watch(Product(KEY, weight.shape, slice(0, ROWS), weight, narrow, gradient))(gradient)
    found = recorder.moments[KEY]
    parts, whole = (Moments.zeros(ROWS, 4, x.device, torch.float32, full_outputs=True) for _ in range(2))
    for number, begin in enumerate(range(0, x.shape[1], STRETCH)):
        stretch = slice(begin, begin + STRETCH)
        for moments in [whole] + [parts] * (number % TALL_OUTPUT_PARTS == 0):
            moments.add_sequences(narrow[:, stretch], gradient[:, stretch])
    torch.testing.assert_close(found.inputs.tril(), whole.inputs.tril(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.outputs.tril(), parts.outputs.tril(), rtol=1e-4, atol=1e-3)
    assert found.trace == pytest.approx(whole.trace, rel=1e-5) and found.trace > 2 * parts.trace
    found.scale(1.0, 0.5)
    assert float(found.outputs.trace()) == pytest.approx(0.5 * whole.trace, rel=1e-4)
    one, other = (each.outputs.diagonal() / each.outputs.trace() for each in (found, parts))
    torch.testing.assert_close(one, other)


def test_tall_matrices_may_have_only_the_diagonal_of_g() -> None:
    """The diagonal, H and the trace are those of the full statistics."""
    x, gradient = tokens(2, STRETCH)
    narrow, narrow_gradient = x[..., :4], gradient[..., :4]

    def moments(x: torch.Tensor, gradient: torch.Tensor, *, tall_outputs: bool) -> Moments:
        weight = torch.zeros(gradient.shape[2], x.shape[2])
        watched = [WatchedLinear(KEY[0], weight)]
        recorder = MomentRecorder(watched, torch.float32, STRETCH, tall_outputs=tall_outputs)
        recorder.watch(Product(KEY, weight.shape, slice(0, len(weight)), weight, x, gradient))(gradient)
        return recorder.moments[KEY]

    full = moments(narrow, gradient, tall_outputs=True)
    found = moments(narrow, gradient, tall_outputs=False)
    assert full.outputs.shape == (ROWS, ROWS) and found.outputs.shape == (ROWS,)
    torch.testing.assert_close(found.outputs, full.outputs.diagonal(), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.inputs.tril(), full.inputs.tril())
    assert found.trace == pytest.approx(full.trace, rel=1e-5)
    assert moments(narrow, narrow_gradient, tall_outputs=False).outputs.shape == (4, 4)
