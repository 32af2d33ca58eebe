"""Which tokens count in the moments of a matrix."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.layerwise.linear_hooks import Product, WatchedLinear
from ciuic_cli.statistics.moments import TALL_OUTPUT_STEP, Moments
from ciuic_cli.statistics.recorder import MomentRecorder

ROWS, COLS = 6, 9
LENGTH = 32
KEY = ("model.layers.0.mlp.up_proj.weight", None)


def tokens(sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (sequences, length, COLS) and gradients (sequences, length, ROWS) with a common direction."""
    generator = torch.Generator().manual_seed(length)
    x = 1.0 + torch.randn(sequences, length, COLS, generator=generator)
    return x, 0.5 + torch.randn(sequences, length, ROWS, generator=generator)


def recorded(x: torch.Tensor, gradient: torch.Tensor) -> Moments:
    recorder = MomentRecorder([], torch.float32)
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


def test_a_batch_is_the_sum_of_its_sequences() -> None:
    x, gradient = tokens(3, 50)
    together = recorded(x, gradient)
    total = recorded(x[:1], gradient[:1])
    for number in (1, 2):
        total.include(recorded(x[number : number + 1], gradient[number : number + 1]))
    assert_equal(together, total)


@pytest.mark.parametrize("expert", [None, 3])
def test_g_of_a_tall_matrix_is_summed_over_every_fourth_token(expert: int | None) -> None:
    """Scaled to the trace of the whole sum. H, and G of other matrices and of experts, have all tokens."""
    x, gradient = tokens(2, 160)
    weight = torch.zeros(ROWS, 4)
    recorder = MomentRecorder([], torch.float32)
    narrow = x[..., :4].contiguous()
    key = (KEY[0], expert)
    recorder.watch(Product(key, weight.shape, slice(0, ROWS), weight, narrow, gradient))(gradient)
    found = recorder.moments[key]
    some, whole = (Moments.zeros(ROWS, 4, x.device, torch.float32, full_outputs=True) for _ in range(2))
    whole.add_tokens(narrow.flatten(0, 1), gradient.flatten(0, 1))
    some.add_tokens(
        *(each[:, TALL_OUTPUT_STEP - 1 :: TALL_OUTPUT_STEP].flatten(0, 1) for each in (narrow, gradient))
    )
    counted = some if expert is None else whole
    torch.testing.assert_close(found.inputs.tril(), whole.inputs.tril(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.outputs.tril(), counted.outputs.tril(), rtol=1e-4, atol=1e-3)
    assert found.trace == pytest.approx(whole.trace, rel=1e-5) and found.trace > 2 * some.trace
    found.scale(1.0, 0.5)
    assert float(found.outputs.trace()) == pytest.approx(0.5 * whole.trace, rel=1e-4)
    one, other = (each.outputs.diagonal() / each.outputs.trace() for each in (found, counted))
    torch.testing.assert_close(one, other)


def test_tall_matrices_may_have_only_the_diagonal_of_g() -> None:
    """H and the trace are those of the full statistics; the diagonal has all tokens."""
    x, gradient = tokens(2, LENGTH)
    narrow, narrow_gradient = x[..., :4], gradient[..., :4]

    def moments(x: torch.Tensor, gradient: torch.Tensor, *, tall_outputs: bool) -> Moments:
        weight = torch.zeros(gradient.shape[2], x.shape[2])
        watched = [WatchedLinear(KEY[0], weight)]
        recorder = MomentRecorder(watched, torch.float32, tall_outputs=tall_outputs)
        recorder.watch(Product(KEY, weight.shape, slice(0, len(weight)), weight, x, gradient))(gradient)
        return recorder.moments[KEY]

    full = moments(narrow, gradient, tall_outputs=True)
    found = moments(narrow, gradient, tall_outputs=False)
    assert full.outputs.shape == (ROWS, ROWS) and found.outputs.shape == (ROWS,)
    whole = Moments.zeros(ROWS, 4, x.device, torch.float32, full_outputs=True)
    whole.add_tokens(narrow.flatten(0, 1), gradient.flatten(0, 1))
    torch.testing.assert_close(found.outputs, whole.outputs.diagonal(), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.inputs.tril(), full.inputs.tril())
    assert found.trace == pytest.approx(full.trace, rel=1e-5)
    assert moments(narrow, narrow_gradient, tall_outputs=False).outputs.shape == (4, 4)
