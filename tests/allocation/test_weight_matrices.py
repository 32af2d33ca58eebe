"""The Fisher information of a matrix: absent tokens, tied matrices, matrices without statistics."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ciuic_cli.allocation.matrices import (
    TOKEN_WEIGHT_EXPONENT,
    UNIFORM_SHARE,
    WeightMatrix,
    fisher_of,
    tempered,
)
from ciuic_cli.statistics.files import EmbeddingUse, Statistics


def _statistics(**parts: Any) -> Statistics:
    statistics = SimpleNamespace(
        input_moment=lambda name, expert: parts.get("h"),
        output_fisher=lambda name, expert: parts.get("g"),
        embedding_use=lambda name: parts.get("use"),
        contexts=lambda name: parts.get("contexts"),
    )
    return cast(Statistics, statistics)


def test_tokens_absent_from_the_text_keep_a_weight() -> None:
    head = WeightMatrix("lm_head.weight", None, "head", 4, 8)
    g = torch.tensor([1.0, 0.0, 3.0, 0.0])
    fisher = fisher_of(head, _statistics(h=torch.eye(8), g=g))
    mixed = (1 - UNIFORM_SHARE) * g + UNIFORM_SHARE * 1.0
    assert torch.allclose(fisher.outputs, tempered(mixed))
    ratio = float(mixed[2] / mixed[1]) ** TOKEN_WEIGHT_EXPONENT
    assert float(fisher.outputs[2] / fisher.outputs[1]) == pytest.approx(ratio)
    assert float(fisher.outputs.sum()) == pytest.approx(4.0)
    wide = dataclasses.replace(head, role="up")  # a diagonal G whose rows are not tokens
    assert torch.allclose(fisher_of(wide, _statistics(h=torch.eye(8), g=g)).outputs, mixed)
    embedding = dataclasses.replace(head, role="embedding")
    use = EmbeddingUse(torch.eye(8) / 8, torch.full((4,), 16.0), torch.tensor([0.5, 0.5, 0.0, 0.0]))
    fisher = fisher_of(embedding, _statistics(use=use))
    assert torch.allclose(fisher.inputs, torch.eye(8) / 8)
    share = torch.tensor([0.5, 0.5, 0.0, 0.0]) * (1 - UNIFORM_SHARE) + UNIFORM_SHARE / 4
    assert torch.allclose(fisher.outputs, tempered(16 * share))
    assert torch.equal(tempered(torch.zeros(3)), torch.zeros(3))


def test_a_tied_matrix_has_the_loss_of_both_uses() -> None:
    matrix = WeightMatrix("model.embed_tokens.weight", None, "embedding", 4, 8)
    h, g = torch.diag(torch.arange(8.0)) / 28, torch.tensor([4.0, 1.0, 1.0, 2.0])
    use = EmbeddingUse(torch.eye(8) / 8, torch.full((4,), 8.0), torch.full((4,), 0.25))
    both = fisher_of(matrix, _statistics(h=h, g=g, use=use))
    head = fisher_of(matrix, _statistics(h=h, g=g))
    alone = fisher_of(matrix, _statistics(use=use))
    mixed = (1 - UNIFORM_SHARE) * g + UNIFORM_SHARE * g.mean()
    assert torch.allclose(both.outputs, tempered(mixed + 2.0))  # a trace of 8, a quarter each
    assert float(both.outputs.sum()) == pytest.approx(float(head.outputs.sum() + alone.outputs.sum()))
    total = head.outputs.sum() * head.inputs + alone.outputs.sum() * alone.inputs
    assert torch.allclose(both.inputs * both.outputs.sum(), total, rtol=1e-5)


def test_a_matrix_without_statistics_has_white_ones() -> None:
    fisher = fisher_of(WeightMatrix("x", 3, "expert_down", 32, 16), _statistics())
    assert torch.allclose(fisher.inputs, torch.eye(16) / 16)
    assert (fisher.outputs > 0).all()
