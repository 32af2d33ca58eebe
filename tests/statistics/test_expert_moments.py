"""Moments of experts: pool and diagonals for large stacks; weighting of tokens, and symmetric products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.passes.feedback import factor_outputs
from ciuic_cli.process.workers import Workers
from ciuic_cli.statistics import experts, sums
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics, StatisticsWriter
from ciuic_cli.statistics.moments import OUTLIER_LIMIT, TALL_OUTPUT_STEP, Moments, vector_norms
from ciuic_cli.statistics.symmetric_product import add_symmetric_product, symmetric_product

NAME = "model.layers.1.mlp.experts.down_proj"


def test_the_limit_is_on_all_experts_of_a_stack() -> None:
    assert experts.full_moments_fit(16, 512, 512)
    assert not experts.full_moments_fit(256, 7168, 2048)  # DeepSeek-V3


def test_diagonals_equal_those_of_full_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(40, 24, generator=generator), torch.randn(40, 16, generator=generator)
    inputs = [Moments.of_inputs(24, x.device, torch.float32, full=full) for full in (True, False)]
    outputs = [Moments.of_outputs(16, g.device, torch.float32, full=full) for full in (True, False)]
    for part in (slice(0, 11), slice(11, 40)):
        for each in inputs:
            each.add_inputs(x[part])
        for each in outputs:
            each.add_outputs(g[part], vector_norms(x[part]))
    torch.testing.assert_close(inputs[1].inputs, inputs[0].inputs.diagonal(), rtol=2.0**-16, atol=1e-5)
    torch.testing.assert_close(outputs[1].outputs, outputs[0].outputs.diagonal(), rtol=2.0**-16, atol=1e-5)
    for full, diagonal in (inputs, outputs):
        assert diagonal.trace == pytest.approx(full.trace) and diagonal.tokens == full.tokens == 40


def test_a_mixed_moment_has_the_pools_correlations_and_variances_between(tmp_path: Path) -> None:
    """The fourth input is always zero."""
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(1))
    x[:, 3] = 0
    g = torch.randn(300, 5, generator=torch.Generator().manual_seed(2))
    pool, expert = (Moments.of_inputs(8, x.device, torch.float32, full=full) for full in (True, False))
    pool.add_inputs(x)
    expert.add_inputs(x[:90])
    pool_outputs, outputs = (
        Moments.of_outputs(5, x.device, torch.float32, full=full) for full in (True, False)
    )
    pool_outputs.add_outputs(g, vector_norms(x))
    outputs.add_outputs(g[:90], vector_norms(x[:90]))
    writer = StatisticsWriter(tmp_path, 300, 300, tmp_path)
    writer.write({("stack", None): pool, ("stack", 0): expert})
    writer.write({("stack", None): pool_outputs, ("stack", 0): outputs})
    writer.finish(Workers())
    statistics = Statistics(tmp_path)
    whole, found = statistics.pool("stack", "inputs"), statistics.input_moment("stack", 0)
    ratios = statistics.pool_ratios("stack", "inputs", 0)
    assert whole is not None and found is not None and ratios is not None
    torch.testing.assert_close(found, ratios[:, None] * whole * ratios, rtol=1e-4, atol=1e-6)
    assert float(found[3].abs().sum()) == 0 and float(ratios[3]) == 0
    prior = experts.DIAGONAL_PRIOR_TOKENS
    # Writing has given both a trace of 1.
    mixed = (90 * expert.inputs + prior * whole.diagonal()) / (90 + prior)
    torch.testing.assert_close(found.diagonal(), mixed)
    assert statistics.pool_ratios("stack", "inputs", 1) is None  # nothing was recorded


def _collect(checkpoint: Path, folder: Path) -> Statistics:
    folder.mkdir()
    batches = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(1))
    return collect_statistics(
        map_model(open_checkpoint(checkpoint)), batches, folder, device=torch.device("cpu"), seed=0,
        progress=lambda what, done, total: None,
    )  # fmt: skip


def test_a_stack_over_the_limit_keeps_pool_and_diagonals(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint("deepseek_v3")
    # With more segments, the pool of diagonals is shrunk, and that of full moments is not.
    monkeypatch.setattr(sums, "SEGMENTS", 1)
    full = _collect(checkpoint, tmp_path / "full")
    monkeypatch.setattr(experts, "FULL_MOMENTS_BYTES", 1000)
    pooled = _collect(checkpoint, tmp_path / "pooled")
    other = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(full.input_moment(other), pooled.input_moment(other))  # type: ignore[arg-type]
    for part in ("inputs", "outputs"):
        torch.testing.assert_close(
            pooled._read(NAME, part, None), full._read(NAME, part, None), rtol=2e-2, atol=1e-7
        )
    size = {
        folder: sum(path.stat().st_size for path in (tmp_path / folder).glob(f"{NAME}.*"))
        for folder in ("full", "pooled")
    }
    assert size["pooled"] < 0.4 * size["full"]
    for expert in range(6):
        assert pooled.tokens(NAME, expert) == full.tokens(NAME, expert) > 20
        for read in ("input_moment", "output_fisher"):
            mine, theirs = getattr(pooled, read)(NAME, expert), getattr(full, read)(NAME, expert)
            assert mine.shape == theirs.shape
            assert bool((torch.linalg.eigvalsh(mine.double()) > -1e-9).all())
            # The trace decides the expert's bits.
            assert float(mine.trace()) == pytest.approx(float(theirs.trace()), rel=0.35)


@pytest.mark.parametrize("width", [5, 128, 300, 1100])
def test_a_moment_with_one_large_direction_stays_positive_definite(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    vectors = 0.02 * torch.randn(3 * width, width, generator=generator)
    vectors += torch.randn(3 * width, 1, generator=generator) * torch.randn(width, generator=generator)
    moment = symmetric_product(vectors, vectors, torch.bfloat16)
    exact = vectors.double().T @ vectors.double()
    torch.testing.assert_close(moment.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
    assert torch.equal(moment, moment.T)
    assert float(torch.linalg.eigvalsh(moment.double())[0]) > 0


@pytest.mark.parametrize("width", [5, 300])
def test_rounded_products_are_off_by_little_of_their_diagonal(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    vectors = torch.randn(400, width, generator=generator) * torch.logspace(-3, 3, width)
    sums = torch.zeros(width, width)
    add_symmetric_product(sums, vectors, vectors, torch.bfloat16, rounded=True)
    moment = _whole(sums)
    exact = vectors.double().T @ vectors.double()
    scale = exact.diagonal().sqrt().outer(exact.diagonal().sqrt())
    assert 1e-6 < float(((moment - exact) / scale).abs().max()) < 2.0**-7
    full = symmetric_product(vectors, vectors, torch.bfloat16)
    torch.testing.assert_close((full / scale).float(), (exact / scale).float(), rtol=0, atol=1e-5)


def _whole(moment: torch.Tensor) -> torch.Tensor:
    return moment.tril() + moment.tril(-1).T


def test_moments_with_one_large_direction_stay_positive() -> None:
    generator = torch.Generator().manual_seed(3)
    x = 0.02 * torch.randn(300, 200, generator=generator)
    x += torch.randn(300, 1, generator=generator) * torch.randn(200, generator=generator)
    g = torch.randn(300, 40, generator=generator) + torch.randn(40, generator=generator)
    h, fisher = (
        Moments.of_inputs(200, x.device, torch.bfloat16),
        Moments.of_outputs(40, x.device, torch.bfloat16),
    )
    h.add_inputs(x)
    fisher.add_outputs(g, vector_norms(x))
    inputs, outputs = _whole(h.inputs), _whole(fisher.outputs)
    for moment in (inputs, outputs):
        values = torch.linalg.eigvalsh(moment.double())
        assert float(values[0]) > -1e-6 * float(values[-1])
    assert factor_outputs(outputs / 300).damping == 0.0
    assert h.trace == pytest.approx(float(inputs.trace()), rel=2e-3)  # of rounded products
    assert fisher.trace == pytest.approx(float(outputs.trace()), rel=2e-3)


def test_tokens_without_input_or_gradient_add_nothing() -> None:
    x, g = torch.ones(4, 3), torch.ones(4, 2)
    x[1], g[2], g[3] = 0.0, 0.0, 1e-30
    found, alone = (Moments.of_outputs(2, x.device, torch.float32) for _ in range(2))
    found.add_outputs(g, vector_norms(x))
    alone.add_outputs(g[:1], vector_norms(x[:1]))
    torch.testing.assert_close(_whole(found.outputs), _whole(alone.outputs))
    assert found.trace == alone.trace == pytest.approx(6**0.5) and found.tokens == 4
    found, alone = (Moments.of_inputs(3, x.device, torch.float32) for _ in range(2))
    found.add_inputs(x[:2])
    alone.add_inputs(x[:1])
    torch.testing.assert_close(_whole(found.inputs), _whole(alone.inputs))
    assert found.trace == alone.trace == pytest.approx(3**0.5) and found.tokens == 2


def test_a_token_counts_with_the_root_of_its_loss() -> None:
    """A gradient or input a thousand times as large gives a thousand times the weight, not a million times."""
    x, g = torch.eye(4), torch.eye(4)
    g[3] *= 1000.0
    found, h = Moments.of_outputs(4, x.device, torch.float32), Moments.of_inputs(4, x.device, torch.float32)
    found.add_outputs(g, vector_norms(x))
    h.add_inputs(g)
    for moment in (h.inputs, found.outputs):
        torch.testing.assert_close(moment.diagonal(), torch.tensor([1.0, 1.0, 1.0, 1000.0]))
    # The sum of all losses, which an even error has, does not depend on the weighting.
    assert float(found.outputs.trace()) * found.energy_ratio == pytest.approx(
        float((x.norm(dim=1) * g.norm(dim=1)).square().sum())
    )


def test_an_outlier_does_not_decide_the_predicted_loss() -> None:
    """A token whose |x| |g| is a thousand times that of the others counts with OUTLIER_LIMIT times the mean."""
    x, g = torch.ones(2000, 1), torch.ones(2000, 1)
    g[7] = 1000.0
    found = Moments.of_outputs(1, x.device, torch.float32)
    found.add_outputs(g, vector_norms(x))
    mean = (1999 + 1000) / 2000
    expected = 1999 + (OUTLIER_LIMIT * mean) ** 2
    assert found.energy_ratio * float(found.outputs.trace()) == pytest.approx(expected, rel=1e-4)
    assert expected < 0.01 * (1999 + 1000**2)


@pytest.mark.parametrize("step", [1, TALL_OUTPUT_STEP])
def test_the_sum_for_g_is_completed(step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x, g = (torch.randn(256, width, generator=generator) for width in (16, 64))
    found = Moments.of_outputs(64, x.device, torch.float32)
    found.add_outputs(g, vector_norms(x), step=step)
    before, trace = found.outputs.tril(), found.trace
    found.scale(1.0, 2.0)
    completed = 2.0 * trace / float(before.trace())  # 2 where all tokens are in the sum
    assert completed == pytest.approx(2.0 * step, rel=0.1)
    torch.testing.assert_close(found.outputs.tril(), before * completed, rtol=1e-5, atol=1e-5)
