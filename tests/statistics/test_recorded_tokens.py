"""Which tokens count in the moments of a matrix."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.layerwise.linear_hooks import Product, WatchedLinear
from ciuic_cli.statistics.moments import TALL_OUTPUT_STEP, Moments, vector_norms
from ciuic_cli.statistics.recorder import InputRecorder, OutputRecorder

ROWS, COLS = 6, 9
LENGTH = 32
KEY = ("model.layers.0.mlp.up_proj.weight", None)


def tokens(sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (sequences, length, COLS) and gradients (sequences, length, ROWS) with a common direction."""
    generator = torch.Generator().manual_seed(length)
    x = 1.0 + torch.randn(sequences, length, COLS, generator=generator)
    return x, 0.5 + torch.randn(sequences, length, ROWS, generator=generator)


def recorded(
    x: torch.Tensor, gradient: torch.Tensor, *, expert: int | None = None, tall_outputs: bool = True
) -> tuple[Moments, Moments]:
    """The sums for H and for G."""
    key, weight = (KEY[0], expert), torch.zeros(gradient.shape[2], x.shape[2])
    watched = [] if expert is not None else [WatchedLinear(KEY[0], weight)]
    inputs = InputRecorder(watched, torch.float32)
    outputs = OutputRecorder(watched, torch.float32, tall_outputs=tall_outputs)
    product = Product(key, weight.shape, slice(0, len(weight)), weight, x, gradient)
    inputs.watch(product)
    outputs.watch(product)(gradient)
    return inputs.moments[key], outputs.moments[key]


def whole_outputs(x: torch.Tensor, gradient: torch.Tensor) -> Moments:
    """The sum for G over all tokens."""
    whole = Moments.of_outputs(gradient.shape[2], x.device, torch.float32)
    whole.add_outputs(gradient.flatten(0, 1), vector_norms(x.flatten(0, 1)))
    return whole


def assert_equal(first: Moments, second: Moments) -> None:
    for one, other in ((first.inputs, second.inputs), (first.outputs, second.outputs)):
        assert one.shape == other.shape
        if one.dim() == 2:
            torch.testing.assert_close(one.tril(), other.tril(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(first.roots.sort().values, second.roots.sort().values)
    for name in ("trace", "tokens"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-4), name


def test_a_batch_is_the_sum_of_its_sequences() -> None:
    x, gradient = tokens(3, 50)
    totals = recorded(x[:1], gradient[:1])
    for number in (1, 2):
        for total, more in zip(
            totals, recorded(x[number : number + 1], gradient[number : number + 1]), strict=True
        ):
            total.include(more)
    for together, total in zip(recorded(x, gradient), totals, strict=True):
        assert_equal(together, total)


def test_the_weight_of_a_sequence_is_that_of_its_tokens() -> None:
    x, gradient = tokens(2, 50)
    recorder, weight = InputRecorder([], torch.float32), torch.zeros(ROWS, COLS)
    for sequence, factor in zip(x, (1.0, 2.5), strict=True):
        recorder.weight = factor
        recorder.watch(Product(KEY, weight.shape, slice(0, ROWS), weight, sequence, gradient))
    found = recorder.moments[KEY]
    alone = [recorded(x[number : number + 1], gradient[number : number + 1])[0] for number in (0, 1)]
    expected = alone[0].inputs + 2.5 * alone[1].inputs
    torch.testing.assert_close(found.inputs.tril(), expected.tril(), rtol=1e-4, atol=1e-3)
    assert found.trace == pytest.approx(alone[0].trace + 2.5 * alone[1].trace, rel=1e-5)


@pytest.mark.parametrize("expert", [None, 3])
def test_g_of_a_tall_matrix_is_summed_over_every_fourth_token(expert: int | None) -> None:
    """Scaled to the trace of the whole sum. G of other matrices and of experts has all tokens."""
    x, gradient = tokens(2, 160)
    narrow = x[..., :4].contiguous()
    _, found = recorded(narrow, gradient, expert=expert)
    whole = whole_outputs(narrow, gradient)
    some = whole_outputs(
        *(each[:, TALL_OUTPUT_STEP - 1 :: TALL_OUTPUT_STEP].contiguous() for each in (narrow, gradient))
    )
    counted = some if expert is None else whole
    torch.testing.assert_close(found.outputs.tril(), counted.outputs.tril(), rtol=1e-4, atol=1e-3)
    assert found.trace == pytest.approx(whole.trace, rel=1e-5) and found.trace > 2 * some.trace
    found.scale(1.0, 0.5)
    assert float(found.outputs.trace()) == pytest.approx(0.5 * whole.trace, rel=1e-4)
    one, other = (each.outputs.diagonal() / each.outputs.trace() for each in (found, counted))
    torch.testing.assert_close(one, other)


def test_tall_matrices_may_have_only_the_diagonal_of_g() -> None:
    """The trace is that of the full statistics; the diagonal has all tokens."""
    x, gradient = tokens(2, LENGTH)
    narrow, narrow_gradient = x[..., :4], gradient[..., :4]
    _, full = recorded(narrow, gradient)
    _, found = recorded(narrow, gradient, tall_outputs=False)
    assert full.outputs.shape == (ROWS, ROWS) and found.outputs.shape == (ROWS,)
    whole = whole_outputs(narrow, gradient)
    torch.testing.assert_close(found.outputs, whole.outputs.diagonal(), rtol=1e-4, atol=0)
    assert found.trace == pytest.approx(full.trace, rel=1e-5)
    assert recorded(narrow, narrow_gradient, tall_outputs=False)[1].outputs.shape == (4, 4)
