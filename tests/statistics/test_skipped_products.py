"""The down projection's product, which the backward sweep leaves out where no gradient depends on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise.linear_hooks import SkippedProducts
from ciuic_cli.statistics import collect
from ciuic_cli.statistics.collect import collect_statistics


def _files(checkpoint: Path, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    batches = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
    collect_statistics(
        map_model(open_checkpoint(checkpoint)), batches, folder,
        device=torch.device("cpu"), seed=0, progress=lambda *_: None, chunk=1,
    )  # fmt: skip
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("family", "skipping_layers"),
    [
        ("llama_tied", 2),
        ("deepseek_v3", 1),  # the others have experts
        ("gemma3", 0),  # a norm reads the outputs
    ],
)
def test_the_product_is_skipped_where_no_gradient_depends_on_it(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    skipping_layers: int,
) -> None:
    find, found_in = collect._Collection._unread, []

    def noted(*arguments: Any) -> list[torch.Tensor]:
        found = find(*arguments)
        found_in.append(len(found))
        return found

    checkpoint = tiny_checkpoint(family)
    monkeypatch.setattr(collect._Collection, "_unread", lambda *_: [])
    expected = _files(checkpoint, tmp_path / "computed")
    monkeypatch.setattr(collect._Collection, "_unread", noted)
    assert _files(checkpoint, tmp_path / "skipped") == expected
    assert sum(found_in) == skipping_layers


def test_a_skipped_product_is_nan_and_has_the_same_gradient() -> None:
    weight, x = torch.randn(4, 3), torch.randn(2, 5, 3, requires_grad=True)
    computed = torch.nn.functional.linear(x, weight)
    (expected,) = torch.autograd.grad(computed, x, torch.ones_like(computed))
    with SkippedProducts([weight]):
        output = torch.nn.functional.linear(x, weight)
        other = torch.nn.functional.linear(x, weight.clone())
    (gradient,) = torch.autograd.grad(output, x, torch.ones_like(output))
    assert output.shape == computed.shape and bool(output.isnan().all())
    assert torch.equal(gradient, expected) and torch.equal(other, computed)
