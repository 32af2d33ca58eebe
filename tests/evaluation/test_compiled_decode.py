"""`ciuic bench --compile`: decoding steps as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.evaluation import bench_process
from ciuic_cli.evaluation.bench_process import cache_keyword, measure
from ciuic_cli.evaluation.compiled_decode import compiled_decode
from ciuic_cli.evaluation.opening import open_model

IDS = torch.randint(3, 260, (1, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def fresh_graphs() -> None:
    torch._dynamo.reset()


def test_an_artifact_decodes_the_same_tokens_in_one_graph(artifact: tuple[Path, Path]) -> None:
    """fullgraph=True fails at a graph break."""
    model = open_model(artifact[1], "cpu", torch.float32)
    found = compiled_decode(model, cache_keyword(model), IDS, 6, 2, backend="aot_eager")
    assert found["same_tokens"] == 1.0
    assert len(found["seconds"]) == 2 and found["compile_seconds"] > max(found["seconds"])


def test_a_graph_break_is_an_error(artifact: tuple[Path, Path]) -> None:
    model = open_model(artifact[1], "cpu", torch.float32)
    model.get_decoder().norm.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(EnvironmentFault, match="compile fails"):
        compiled_decode(model, cache_keyword(model), IDS, 2, 1, backend="aot_eager")


def test_families_that_transformers_does_not_compile(tiny_checkpoint: Callable[..., Path]) -> None:
    model = open_model(tiny_checkpoint("deepseek_v4"), "cpu")
    with pytest.raises(UsageError, match="does not support compiled steps"):
        compiled_decode(model, cache_keyword(model), IDS, 2, 1)


def test_bench_reports_it(tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def quickly(*arguments: Any) -> dict[str, Any]:
        return compiled_decode(*arguments, backend="aot_eager")

    monkeypatch.setattr(bench_process, "compiled_decode", quickly)
    steps = []
    figures = measure(
        str(tiny_checkpoint("llama")), 24, 3, 2, 1, "cpu", [8], True, lambda *step: steps.append(step)
    )
    assert figures["decode_compiled"]["mean"] > 0 and figures["compile_seconds"] > 0
    assert 0 <= figures["same_tokens"] <= 1
    assert steps[-1] == (6, 6)
