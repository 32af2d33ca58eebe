"""The KL divergence measured layer by layer against that of the whole model in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ciuic_cli.allocation.matrices import weight_matrices
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.evaluation.estimates import mean_of
from ciuic_cli.evaluation.kl_meter import KLMeter
from ciuic_cli.layerwise import logits as layer_logits
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.process.threads import threads


class MemoryMark:
    """A mark that only this process knows."""

    state: Mapping[str, Any] | None = None

    def load(self) -> Mapping[str, Any] | None:
        return self.state

    def save(self, state: Mapping[str, Any]) -> None:
        self.state = state


CHANGED = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("tokens_at_a_time", [7, 24, 100])
def test_kl_equals_the_whole_models(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokens_at_a_time: int,
) -> None:
    monkeypatch.setattr(layer_logits, "LEAST_TOKENS", 1)
    monkeypatch.setattr(layer_logits, "LOGIT_BYTES", tokens_at_a_time * 4 * 256)
    checkpoint = tiny_checkpoint("llama")
    batches = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
    meter = KLMeter(
        map_model(open_checkpoint(checkpoint)),
        batches,
        tmp_path / "meter",
        device=torch.device("cpu"),
        progress=lambda what, done, total: None,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weight = model.get_parameter(CHANGED)
    with torch.no_grad():
        log_p = model(input_ids=batches).logits.log_softmax(-1)
        weight.mul_(1.5)
        log_q = model(input_ids=batches).logits.log_softmax(-1)
    kls = (log_p.exp() * (log_p - log_q)).sum(-1).double().numpy()
    for tokens in (10, 24):
        expected = mean_of([*kls[:, :tokens]])
        (found,) = meter.measure_variants(
            [({(CHANGED, None)}, tokens)],
            lambda name, expert: weight.detach().clone() if name == CHANGED else None,
            tmp_path / "variants",
            limit=0,
            progress=lambda done, total: None,
            mark=MemoryMark(),
        )
        assert expected.value > 1e-6
        assert found.value == pytest.approx(expected.value, rel=1e-3)
        assert found.stderr == pytest.approx(expected.stderr, rel=1e-2)


def _meter(checkpoint: Path, folder: Path) -> KLMeter:
    batches = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
    return KLMeter(
        map_model(open_checkpoint(checkpoint)),
        batches,
        folder,
        device=torch.device("cpu"),
        progress=lambda what, done, total: None,
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_the_head_runs_several_sequences_at_once_with_the_same_results(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Parts of seven tokens, so that threads change places within sequences."""
    monkeypatch.setattr(layer_logits, "LEAST_TOKENS", 1)
    monkeypatch.setattr(layer_logits, "LOGIT_BYTES", 7 * 4 * 256)
    checkpoint, found = tiny_checkpoint(family), []

    def changed(name: str, expert: int | None) -> torch.Tensor | None:
        return model_map.read(name).float().flip(0) if "o_proj" in name else None

    model_map = map_model(open_checkpoint(checkpoint))
    for number in (1, 2, 3):
        with threads(number):
            meter = _meter(checkpoint, tmp_path / str(number))
            found.append([part.tolist() for part in meter.token_kls(changed)])
    assert found[0] == found[1] == found[2]
    assert min(sum(part) for part in found[0]) > 1e-3


@pytest.mark.parametrize("limit", [0, 1 << 20])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_variants_together_measure_what_each_measures_alone(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, limit: int
) -> None:
    """Matrices in layers, experts and the tied embedding; no variant leaves its values to the next one."""
    checkpoint = tiny_checkpoint(family)
    meter = _meter(checkpoint, tmp_path / "meter")
    model_map = map_model(open_checkpoint(checkpoint))
    matrices = weight_matrices(model_map.parameters.values())
    roles = sorted({matrix.role for matrix in matrices})
    variants = [({(m.name, m.expert) for m in matrices if m.role == role}, 10) for role in roles]
    variants += [({(m.name, m.expert) for m in matrices}, 24), (set(), 24)]
    asked: list[Key] = []

    def noisy(name: str, expert: int | None) -> torch.Tensor | None:
        asked.append((name, expert))
        value = model_map.read(name) if expert is None else model_map.read_expert(name, expert)
        return value.float() * (1.25 if "proj" in name else 0.75)

    def measure(numbers: Sequence[int]) -> list[float]:
        kls = meter.measure_variants(
            [variants[number] for number in numbers],
            noisy,
            tmp_path / f"variants{numbers[0]}",
            limit=limit,
            progress=lambda done, total: None,
            mark=MemoryMark(),
        )
        return [kl.value for kl in kls]

    alone = [measure([number])[0] for number in range(len(variants))]
    asked.clear()
    together = measure(range(len(variants)))
    assert together == alone
    assert together[-1] == pytest.approx(0.0, abs=1e-6)
    assert min(together[:-1]) > 1e-6 and len({*together}) == len(together)
    if limit:
        assert len(asked) == len({*asked}) == len(variants[-2][0])
        assert not list((tmp_path / "variants0/values").iterdir())


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_interrupted_variants_continue_after_the_last_finished_layer(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    checkpoint = tiny_checkpoint(family)
    meter, mark = _meter(checkpoint, tmp_path / "meter"), MemoryMark()
    model_map = map_model(open_checkpoint(checkpoint))
    matrices = weight_matrices(model_map.parameters.values())
    asked: list[Key] = []

    def noisy(name: str, expert: int | None) -> torch.Tensor | None:
        asked.append((name, expert))
        value = model_map.read(name) if expert is None else model_map.read_expert(name, expert)
        return value.float() * 1.25

    def measure(folder: Path, progress: Callable[[int, int], None]) -> list[float]:
        keys = {(m.name, m.expert) for m in matrices}
        attention = {key for key in keys if "attn" in key[0]}
        kls = meter.measure_variants(
            [(attention, 10), (keys, 24)], noisy, folder, limit=1 << 20, progress=progress, mark=mark
        )
        return [kl.value for kl in kls]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "run", interrupt)
    asked.clear()
    finished: list[int] = []
    continued = measure(tmp_path / "run", lambda done, total: finished.append(done))
    assert finished[0] == 2
    assert not any(name.startswith("model.layers.0.") for name, _ in asked)
    mark.state = None
    assert measure(tmp_path / "whole", lambda done, total: None) == continued
    assert any(name.startswith("model.layers.0.") for name, _ in asked)
