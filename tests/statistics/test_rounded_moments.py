"""H from vectors that are rounded to bfloat16, used for feedback."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.codecs.transform import transform
from ciuic_cli.passes.feedback import columns_of, factor_inputs
from ciuic_cli.statistics.moments import Moments

TOKENS, COLS = 2000, 768
"""With fewer columns the test passes even if every sum is rounded to bfloat16, because H is damped."""


def _expected_loss(x: torch.Tensor, dtype: torch.dtype) -> float:
    """The expected loss of noise, as a share of the loss without feedback.

    The feedback is that of the H of these tokens, with vectors rounded to `dtype`. The loss is that under the exact H.
    """
    found = Moments.of_inputs(COLS, x.device, dtype)
    found.add_inputs(x)
    h = found.inputs.tril() + found.inputs.tril(-1).T
    factors = factor_inputs(h / h.trace())
    assert factors.ldl.factor is not None
    weighted = x / x.norm(dim=1, keepdim=True).sqrt()
    vectors = transform(weighted)[:, columns_of(factors.block_order)]
    fed_back = torch.linalg.solve_triangular(factors.ldl.factor.double(), vectors.T.double(), upper=False)
    return float(fed_back.square().sum() / weighted.double().square().sum())


@pytest.mark.parametrize("share", [0.0, 0.9, 0.99, 0.9999])
def test_rounding_the_inputs_loses_nothing_where_one_direction_has_nearly_all(share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, COLS, generator=generator)
    x *= torch.logspace(0, -2, COLS)
    # One direction in a few channels, the same at every token: the rounding errors of all tokens add up.
    direction = torch.zeros(COLS)
    direction[5:8] = torch.tensor([3.0, -2.0, 1.0])
    size = (share / (1 - share) * x.square().sum(1).mean()).sqrt() if share else torch.zeros(())
    x = (x + size * direction / direction.norm()).bfloat16().float()
    exact, rounded = (_expected_loss(x, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert exact < 0.9
    assert rounded == pytest.approx(exact, rel=0.002)
