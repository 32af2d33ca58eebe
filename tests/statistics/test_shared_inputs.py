"""Matrices with the same inputs: how they are found, and that they share H and its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.layerwise.linear_hooks import WatchedLinear
from ciuic_cli.statistics.collect import collect_statistics
from ciuic_cli.statistics.files import Statistics
from ciuic_cli.statistics.recorder import InputSharing


def _collect(checkpoint: Path, folder: Path) -> Statistics:
    folder.mkdir()
    batches = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
    return collect_statistics(
        map_model(open_checkpoint(checkpoint)), batches, folder, device=torch.device("cpu"), seed=0,
        progress=lambda what, done, total: None,
    )  # fmt: skip


def test_matrices_share_inputs_only_where_they_multiply_the_same_tokens() -> None:
    """The third one multiplies a copy, the fifth and sixth no tokens, the seventh the changed inputs."""
    weights = [torch.randn(4, 3) for _ in range(8)]
    x = torch.randn(2, 5, 3)
    sharing = InputSharing([WatchedLinear(str(number), weight) for number, weight in enumerate(weights)])
    with sharing, torch.no_grad():
        for number, inputs in enumerate((x, x, x.clone(), x, x[:0], x[:0])):
            torch.nn.functional.linear(inputs, weights[number])
        x += 1.0
        torch.nn.functional.linear(x, weights[6])
    assert sharing.firsts() == [0, 0, 2, 0, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("family", "shared"),
    [
        ("llama", [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]),
        ("deepseek_v3", [("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")]),
    ],
)
def test_matrices_with_the_same_inputs_share_h(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    shared: list[tuple[str, ...]],
) -> None:
    """H and G are those of a run in which no matrix shares its H."""
    checkpoint = tiny_checkpoint(family)
    found = _collect(checkpoint, tmp_path / "shared")
    monkeypatch.setattr(InputSharing, "firsts", lambda self: list(range(len(self._inputs))))
    alone = _collect(checkpoint, tmp_path / "alone")
    files: dict[str, list[str]] = {}
    for parameter in map_model(open_checkpoint(checkpoint)).parameters.values():
        if not (parameter.compress and parameter.name.startswith("model.layers.1.")):
            continue
        files.setdefault(found._files["inputs"][parameter.name], []).append(parameter.name)
        for expert in range(parameter.shape[0]) if len(parameter.shape) == 3 else [None]:
            for read in ("input_moment", "output_fisher"):
                one, other = (getattr(each, read)(parameter.name, expert) for each in (found, alone))
                assert torch.equal(one, other)
    leaves = [tuple(name.split(".")[-2] for name in names) for names in files.values() if len(names) > 1]
    assert leaves == shared


def test_h_is_deleted_with_the_last_matrix_that_has_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    statistics = _collect(tiny_checkpoint("llama"), tmp_path / "s")
    finished: set[str] = set()
    for leaf in ("k_proj", "q_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{leaf}.weight"
        h, g = (statistics.folder / statistics._files[kind][name] for kind in ("inputs", "outputs"))
        assert h.exists() and g.exists()
        finished.add(name)
        statistics.delete(name, finished.__contains__)
        assert not g.exists()
    assert not h.exists()
