"""Codes with error feedback in blocks of GGUF types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from random_moments import random_contexts

from ciuic_cli.export.gguf.blocks import layout_of
from ciuic_cli.export.gguf.feedback import feedback_of, rounded, rounded_to_grid
from ciuic_cli.export.gguf.grids import grid_of
from ciuic_cli.export.gguf.header import tensor_places
from ciuic_cli.export.gguf.types import TYPES
from ciuic_cli.passes.fisher import KroneckerFisher

gguf = pytest.importorskip("gguf")

CODED = [kind.name for kind in TYPES if layout_of(kind.name)]
GRIDS = [kind.name for kind in TYPES if grid_of(kind.name)]


def test_types_of_single_weights_have_layouts() -> None:
    assert set(CODED) == {
        "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q2_0", "MXFP4", "Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1",
    }  # fmt: skip


def test_all_other_types_but_the_largest_have_grids() -> None:
    assert set(GRIDS) == {kind.name for kind in TYPES} - {*CODED, "Q8_0"}


@pytest.mark.parametrize("name", GRIDS)
def test_written_points_are_decoded(name: str) -> None:
    """The package gguf decodes ± step * coordinate for random points and signs, with the scales that were there."""
    layout = grid_of(name)
    assert layout is not None
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (20, layout.kind.block_bytes), np.uint8)
    blocks[:, :2] = generator.uniform(0.01, 1, (20, 1)).astype(np.float16).view(np.uint8)
    step = layout.steps(blocks)
    assert len(np.unique(step)) > 100
    points = generator.integers(0, len(layout.grid), (20, 256 // layout.width)).astype(np.uint16)
    negative = generator.integers(0, 2, (20, 256)).astype(bool)
    if layout.even:
        negative[:, 7::8] = negative.reshape(20, 32, 8)[..., :7].sum(2) % 2
    layout.set_codes(blocks, points, negative)
    expected = step * layout.grid[points].reshape(20, 256) * np.where(negative, -1, 1)
    np.testing.assert_allclose(layout.decoded(blocks), expected, rtol=1e-6)
    np.testing.assert_array_equal(layout.steps(blocks), step)


@pytest.mark.parametrize("name", GRIDS)
def test_feedback_lowers_the_quadratic_loss_of_grids(name: str) -> None:
    """Codes with feedback beside codes without it; signs keep to the type's condition."""
    layout = grid_of(name)
    assert layout is not None
    torch.manual_seed(0)
    m, n = 24, 256
    weight, step = torch.randn(m, n), torch.full((m, n), 2.4 / float(layout.grid.max()))
    root = torch.randn(n, 16) @ torch.randn(16, n) / 4 + torch.randn(n, n)
    h = root.T @ root / n

    def loss(moment: torch.Tensor) -> float:
        fisher = KroneckerFisher(moment, torch.ones(m))
        points, negative = rounded_to_grid(weight, step, layout, feedback_of(fisher, 8))
        if layout.even:
            assert (negative.reshape(m, -1, 8).sum(2) % 2 == 0).all()
        signs = torch.where(negative, -1.0, 1.0)
        error = weight - step * torch.from_numpy(layout.grid)[points].reshape(m, n) * signs
        return float(((error @ h) * error).sum())

    assert loss(h) < 0.5 * loss(torch.eye(n))


def test_points_are_the_best_of_all() -> None:
    """Without correlations: no other point of the grid is nearer to any group of weights with the same signs."""
    layout = grid_of("IQ3_S")
    assert layout is not None
    torch.manual_seed(0)
    weight, step = torch.randn(6, 256), torch.full((6, 256), 0.15)
    fisher = KroneckerFisher(torch.eye(256), torch.ones(6))
    points, negative = rounded_to_grid(weight, step, layout, feedback_of(fisher, 8))
    assert torch.equal(negative, weight < 0)
    groups = weight.abs().reshape(-1, 4)
    costs = torch.cdist(groups, 0.15 * torch.from_numpy(layout.grid))
    torch.testing.assert_close(costs.gather(1, points.reshape(-1, 1))[:, 0], costs.amin(1))


@pytest.mark.parametrize("name", CODED)
def test_written_codes_are_decoded(name: str) -> None:
    """The package gguf decodes what step, level and offset say, for every code at every place."""
    layout = layout_of(name)
    assert layout is not None
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (200, layout.kind.block_bytes), np.uint8)
    halves = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2, "MXFP4": 0}.get(name, 1)
    start = layout.kind.block_bytes - 2 if name == "Q6_K" else 0
    scales = generator.uniform(0.01, 1, (200, halves)).astype(np.float16)
    blocks[:, start : start + 2 * halves] = scales.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = generator.integers(120, 130, 200)
    step, offset = layout.steps_and_offsets(blocks)
    codes = generator.integers(0, len(layout.levels), (200, layout.kind.block), np.uint8)
    before = blocks.copy()
    layout.set_codes(blocks, codes)
    expected = step * layout.levels[codes] + offset
    np.testing.assert_allclose(
        layout.decoded(blocks), expected, rtol=1e-5, atol=1e-4 * np.abs(expected).max()
    )
    places = np.unique(np.concatenate([part.place for part in layout.bits]))
    others = np.setdiff1d(np.arange(layout.kind.block_bytes), places)
    assert (blocks[:, others] == before[:, others]).all()
    assert len(others) * 8 + layout.kind.block * sum(part.width for part in layout.bits) == 8 * len(blocks[0])


def test_feedback_lowers_the_quadratic_loss() -> None:
    """With inputs that share a direction; without correlations it changes nothing."""
    torch.manual_seed(0)
    n, levels = 64, torch.arange(-8.0, 8.0)
    weight, step, offset = torch.randn(40, n), torch.full((40, n), 0.4), torch.zeros(40, n)

    def loss(h: torch.Tensor, codes: torch.Tensor) -> float:
        error = weight - step * levels[codes.long()]
        return float(((error @ h) * error).sum())

    nearest = ((weight / 0.4).round() + 8).clamp(0, 15).to(torch.uint8)
    root = torch.randn(n, 8) @ torch.randn(8, n) + 0.3 * torch.randn(n, n)
    correlated = root.T @ root / n
    codes = rounded(weight, step, offset, levels, feedback_of(KroneckerFisher(correlated, torch.ones(40))))
    assert loss(correlated, codes) < 0.4 * loss(correlated, nearest)
    diagonal = torch.diag(torch.rand(n) + 0.1)
    assert torch.equal(
        rounded(weight, step, offset, levels, feedback_of(KroneckerFisher(diagonal, torch.ones(40)))), nearest
    )


def test_contexts_enter_by_their_mean() -> None:
    torch.manual_seed(0)
    h, contexts, g = torch.eye(6), random_contexts(9, 6), torch.rand(9)
    v = contexts.float32()
    whole = h + sum(g[row] / g.sum() * torch.outer(v[row], v[row]) for row in range(9))
    one, other = feedback_of(KroneckerFisher(h, g, contexts)), feedback_of(KroneckerFisher(whole, g))
    assert torch.equal(one.order, other.order)
    assert one.factor is not None and other.factor is not None
    torch.testing.assert_close(one.factor, other.factor)
    torch.testing.assert_close(
        one.factor.T @ one.factor, _damped(whole)[one.order][:, one.order].inverse(), rtol=1e-4, atol=1e-4
    )


def _damped(h: torch.Tensor) -> torch.Tensor:
    from ciuic_cli.passes.feedback import damp

    h = h.clone()
    damp(h)
    return h


def test_a_two_bit_block_gets_a_step_of_its_own(tmp_path: Path) -> None:
    """llama.cpp takes the largest weight as the step of Q2_0, which makes most weights zero."""
    from ciuic_cli.export.gguf.feedback import _search_scales

    torch.manual_seed(0)
    layout = layout_of("Q2_0")
    assert layout is not None
    weight = torch.randn(8, 64)
    blocks = np.zeros((8, 18), np.uint8)
    _search_scales(blocks, weight, layout, torch.ones(64))
    steps = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    assert (np.abs(steps) < 0.8 * weight.abs().amax(1, keepdim=True).numpy()).all()
    codes = rounded(
        weight, torch.from_numpy(steps).expand(8, 64), torch.zeros(8, 64), torch.from_numpy(layout.levels),
        feedback_of(KroneckerFisher(torch.eye(64), torch.ones(8))),
    )  # fmt: skip
    layout.set_codes(blocks, codes.numpy())
    assert (torch.from_numpy(layout.decoded(blocks)) - weight).square().mean() < 0.3 * weight.square().mean()


def test_tensors_are_found_in_the_file(tmp_path: Path) -> None:
    """Also behind metadata of every kind, and with another alignment."""
    file, tensors = (
        tmp_path / "x.gguf",
        {"a.weight": np.arange(5, dtype=np.float32), "b": np.ones((3, 7), np.float32)},
    )
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_custom_alignment(64)
    writer.add_array("words", ["one", "two words"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_bool("yes", True)
    writer.add_float64("x", 0.5)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    places = tensor_places(file)
    assert places == {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(file).tensors}
    with pytest.raises(ValueError, match="no GGUF file"):
        tensor_places(Path(__file__))
