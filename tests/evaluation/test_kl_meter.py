"""The KL divergence measured layer by layer against that of the whole model in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.evaluation import kl_meter
from ciuic_cli.evaluation.estimates import mean_of
from ciuic_cli.evaluation.kl_meter import KLMeter
from ciuic_cli.layerwise import logits as layer_logits

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
    for tokens in (10, None):
        expected = mean_of([*kls[:, :tokens]])
        found = meter.measure(
            lambda name, expert: weight.detach() if name == CHANGED else None, tokens=tokens
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


def test_two_meters_at_once_measure_what_each_measures_alone(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama")
    meters = [meter := _meter(checkpoint, tmp_path / "one"), meter.twin(tmp_path / "two")]
    original = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).get_parameter(CHANGED)
    factors, tokens = (1.5, 0.5), (10, None)

    def measure(number: int) -> float:
        changed = original.detach() * factors[number]
        return (
            meters[number]
            .measure(lambda name, expert: changed if name == CHANGED else None, tokens=tokens[number])
            .value
        )

    alone = [measure(0), measure(1)]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(measure, (0, 1))] == alone
    assert min(alone) > 1e-6


def test_one_meter_at_a_time_with_a_large_vocabulary_or_experts(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    llama = _meter(tiny_checkpoint("llama"), tmp_path / "llama")
    assert llama.meters_side_by_side() == 2
    monkeypatch.setattr(kl_meter, "PARALLEL_WORK_BYTES", 256 * 4)
    assert llama.meters_side_by_side() == 1
    monkeypatch.undo()
    assert _meter(tiny_checkpoint("deepseek_v3"), tmp_path / "v3").meters_side_by_side() == 1
