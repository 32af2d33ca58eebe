"""The prune pass: losses against brute force, the least-squares correction, shares and masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.prune import (
    Structure,
    channel_loss,
    correct_kept,
    groups_to_prune,
    masks,
    pruned_columns,
)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _moment(size: int, seed: int) -> torch.Tensor:
    """A correlated second moment: twice as many samples as dimensions, with a few shared directions."""
    x = _random(2 * size, size, seed=seed) + 2 * _random(2 * size, 4, seed=seed + 1) @ _random(
        4, size, seed=seed + 2
    )
    return x.T @ x / (2 * size)


def _loss(error: torch.Tensor, outputs: torch.Tensor, inputs: torch.Tensor) -> float:
    g = torch.diag(outputs) if outputs.dim() == 1 else outputs
    return 0.5 * float(torch.trace(error.T @ g @ error @ inputs))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("cols", [64, 88])
def test_channel_loss_equals_the_loss_of_zeroed_columns(full: bool, cols: int) -> None:
    down, h = _random(40, cols, seed=1), _moment(cols, 2)
    g = _moment(40, 5) if full else _moment(40, 5).diagonal().clone()
    losses = channel_loss(down, KroneckerFisher(h, g))
    assert len(losses) == -(-cols // 16)
    for block, loss in enumerate(losses):
        error = torch.zeros_like(down)
        error[:, 16 * block : 16 * (block + 1)] = down[:, 16 * block : 16 * (block + 1)]
        assert loss == pytest.approx(_loss(error, g, h), rel=1e-4)


def test_correction_makes_pruning_cheaper() -> None:
    down, h, g = _random(40, 64, seed=6), _moment(64, 7), _moment(40, 8)
    pruned = torch.zeros(64, dtype=torch.bool)
    pruned[16:32] = True
    corrected = correct_kept(down, h, pruned)
    plain = down.clone()
    plain[:, pruned] = 0.0
    assert not corrected[:, pruned].any()
    assert _loss(down - corrected, g, h) < 0.7 * _loss(down - plain, g, h)
    assert torch.equal(down, _random(40, 64, seed=6))  # the argument is unchanged


def test_correction_is_nearly_the_least_squares_optimum() -> None:
    """At the optimum the energy is that of the Schur complement; one per cent of damping costs little more."""
    down, h = _random(24, 48, seed=9), _moment(48, 10)
    pruned = torch.zeros(48, dtype=torch.bool)
    pruned[:16] = True
    schur = h[:16, :16] - h[:16, 16:] @ torch.linalg.solve(h[16:, 16:], h[16:, :16])
    best = _loss(down[:, :16], torch.ones(24), schur)
    found = _loss(down - correct_kept(down, h, pruned), torch.ones(24), h)
    assert best * (1 - 1e-4) <= found <= 1.05 * best


def test_uncorrelated_inputs_need_no_correction() -> None:
    down = _random(24, 32, seed=11)
    pruned = torch.zeros(32, dtype=torch.bool)
    pruned[16:] = True
    corrected = correct_kept(down, torch.diag(torch.rand(32) + 0.5), pruned)
    assert torch.allclose(corrected[:, :16], down[:, :16], atol=1e-6)


def test_constant_and_dead_inputs_stay_finite() -> None:
    h = torch.zeros(32, 32)
    h[:20, :20] = torch.ones(20, 20)  # singular, and twelve inputs are always 0
    pruned = torch.zeros(32, dtype=torch.bool)
    pruned[:16] = True
    assert torch.isfinite(correct_kept(_random(24, 32, seed=12), h, pruned)).all()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_a_share_prunes_the_groups_with_the_least_loss_per_weight(share: float) -> None:
    rng = np.random.default_rng(0)
    candidates = {"a": (rng.random(40), 16 * 64), "b": (4 * rng.random(20), 16 * 128)}
    found = groups_to_prune(candidates, share)
    assert {key: mask.shape for key, mask in found.items()} == {"a": (40,), "b": (20,)}
    total = sum(len(losses) * weights for losses, weights in candidates.values())
    taken = sum(int(found[key].sum()) * weights for key, (_, weights) in candidates.items())
    assert share * total <= taken < share * total + 16 * 128
    if share in (0.0, 1.0):
        assert taken == share * total
    rates = {key: losses / weights for key, (losses, weights) in candidates.items()}
    pruned = [rate for key in found for rate in rates[key][found[key]]]
    kept = [rate for key in found for rate in rates[key][~found[key]]]
    if pruned and kept:
        assert max(pruned) <= min(kept)


def test_a_share_that_whole_groups_make_up_is_taken_exactly() -> None:
    candidates = {"a": (np.arange(8.0), 256)}
    assert groups_to_prune(candidates, 0.25)["a"].tolist() == [True, True, *[False] * 6]


def test_masks_and_pruned_columns() -> None:
    structures = [
        Structure("down", 1, (("gate", 1), ("up", 1)), 0.1),
        Structure("down", 5, (("gate", 5), ("up", 5)), 0.1),
        Structure("expert", None, (("expert", 0), ("expert", 1)), 0.2),
    ]
    found = masks(structures, {"gate": 6, "up": 6, "expert": 2})
    assert sorted(found) == ["expert", "gate", "up"]
    assert found["gate"].tolist() == [False, True, False, False, False, True]
    assert found["up"].tolist() == found["gate"].tolist()
    assert found["expert"].all()
    columns = pruned_columns(structures, "down", 88)
    assert columns is not None
    assert columns.shape == (88,)
    assert columns.nonzero()[:, 0].tolist() == [*range(16, 32), *range(80, 88)]
    assert pruned_columns(structures, "expert", 88) is None  # pruned as a whole, not by columns
    assert pruned_columns(structures, "other", 88) is None
