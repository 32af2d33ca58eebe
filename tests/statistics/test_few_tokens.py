"""Moments from few tokens: how much of their correlations is noise, and what remains of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.process.workers import Workers
from ciuic_cli.statistics import lower_half, sums
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics
from ciuic_cli.statistics.moments import Moments, noise_share
from ciuic_cli.statistics.sums import OrderedSums

CPU = torch.device("cpu")
SIZE = 40


def correlations(moment: torch.Tensor) -> torch.Tensor:
    """The correlations of a full matrix, 0 on the diagonal."""
    root = moment.diagonal().rsqrt()
    return (moment * root[:, None] * root).fill_diagonal_(0.0)


def segment(tokens: int, mixing: torch.Tensor, generator: torch.Generator) -> Moments:
    """The sums, without weights, of a segment whose inputs and gradients have the second moment mixing mixingᵀ."""
    x, g = (torch.randn(tokens, SIZE, generator=generator) @ mixing.T for _ in range(2))
    moments = Moments(x.T @ x, g.T @ g, trace=float(g.square().sum()), tokens=tokens)
    moments.note_segment()
    return moments


def total_of(lengths: list[int], mixing: torch.Tensor, seed: int) -> Moments:
    generator, ordered = torch.Generator().manual_seed(seed), OrderedSums(Workers(), ["w"], CPU)
    for tokens in lengths:
        ordered.add({("w", None): segment(tokens, mixing, generator)})
    return ordered.totals["w", None]


def noise_of(total: Moments) -> tuple[float, float]:
    """The shares of noise in H and in G."""
    return (
        noise_share(
            lower_half.squared_correlations(total.inputs), [(s.tokens, s.inputs) for s in total.segments]
        ),
        noise_share(
            lower_half.squared_correlations(total.outputs), [(s.tokens, s.outputs) for s in total.segments]
        ),
    )


@pytest.mark.parametrize("size", [1, 2, 256, 600])
def test_squared_correlations(size: int) -> None:
    moment = torch.randn(size, size)
    moment = moment @ moment.T
    expected = float(correlations(moment).square().sum()) / 2
    lower = torch.where(torch.ones(size, size).tril() > 0, moment, torch.nan)
    assert lower_half.squared_correlations(lower) == pytest.approx(expected, rel=1e-4)
    moment[0] = moment[:, 0] = 0.0
    expected = float(correlations(moment[1:, 1:]).square().sum()) / 2
    assert lower_half.squared_correlations(moment) == pytest.approx(expected, rel=1e-4)


def test_the_noise_is_that_of_the_truth() -> None:
    """On average over draws, what the best shrinkage leaves out, which knows the true correlations."""
    mixing = torch.eye(SIZE) + 0.15 * torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    truth = correlations(mixing @ mixing.T)
    estimates, best = [], []
    for seed in range(8):
        total = total_of([100, 300, 80, 200], mixing, seed)
        estimates += noise_of(total)
        for moment in (total.inputs, total.outputs):
            found = correlations(moment.tril() + moment.tril(-1).T)
            best.append(1 - float((found * truth).sum() / found.square().sum()))
    assert sum(estimates) / 16 == pytest.approx(sum(best) / 16, rel=0.2)
    assert 0.05 < sum(best) / 16 < 0.5


def test_vectors_without_correlations_are_all_noise() -> None:
    assert min(noise_of(total_of([200, 200, 200], torch.eye(SIZE), 0))) > 0.8


@pytest.mark.parametrize("parts", [[], [(100, 5.0)], [(100, 5.0), (50, 0.0)], 3 * [(100, 5.0)]])
def test_one_part_or_equal_ones_show_no_noise(parts: list[tuple[int, float]]) -> None:
    assert noise_share(5.0, parts) == 0.0


def test_what_is_noise_is_left_out() -> None:
    total = total_of([80, 120], torch.eye(SIZE) + 0.1, 2)
    before, noise = (total.inputs.tril(), total.outputs.tril()), noise_of(total)
    total.scale(0.5, 3.0)
    for found, old, factor, share in zip(
        (total.inputs, total.outputs), before, (0.5, 3.0), noise, strict=True
    ):
        diagonal = old.diagonal().diag()
        torch.testing.assert_close(found.tril(), factor * (diagonal + (1 - share) * (old - diagonal)))
        assert 0.01 < share < 0.99


def test_the_statistics_of_a_model_are_shrunk(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All off-diagonal numbers of a matrix by one factor, and none of them if the text is one segment. Those of experts
    are not: they are shrunk towards the pool of their stack."""
    model_map = map_model(open_checkpoint(tiny_checkpoint("deepseek_v3")))
    batches = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(1))

    def collect(folder: Path) -> Statistics:
        folder.mkdir()
        return collect_statistics(
            model_map, batches, folder, device=CPU, seed=0, chunk=1, progress=lambda what, done, total: None
        )

    shrunk = collect(tmp_path / "segments")
    monkeypatch.setattr(sums, "SEGMENTS", 1)
    whole = collect(tmp_path / "one")
    cases = (
        ("self_attn.o_proj.weight", None),
        ("mlp.shared_experts.down_proj.weight", None),
        ("mlp.experts.down_proj", 1),
    )
    for (name, expert), part in product(cases, ("input_moment", "output_fisher")):
        found, old = (getattr(each, part)(f"model.layers.1.{name}", expert) for each in (shrunk, whole))
        torch.testing.assert_close(found.diagonal(), old.diagonal())
        ratio = float(found[0, 1] / old[0, 1])
        assert 0.01 < ratio < 0.99 if expert is None else ratio == pytest.approx(1.0, rel=0.01)
        diagonal = old.diagonal().diag()
        torch.testing.assert_close(
            found, diagonal + ratio * (old - diagonal), rtol=0.02, atol=1e-3 * float(old.max())
        )
