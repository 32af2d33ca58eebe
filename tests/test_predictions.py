"""Predictions part by part are those of the whole window, whatever a family does around its layers and its head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import TINY_CONFIGS, VOCABULARY

from ciuic_cli.evaluate import evaluate
from ciuic_cli.opening import open_model
from ciuic_cli.predictions import predictions
from ciuic_cli.statistics import streaming


@pytest.fixture
def _sixteen_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "LOGIT_BYTES", 16 * 4 * VOCABULARY)


@pytest.mark.usefixtures("_sixteen_tokens_at_a_time")
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_parts_make_up_the_whole(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    model = open_model(tiny_checkpoint(family), "cpu", torch.float32)
    model.config.final_logit_softcapping = 2.0  # of what follows the head; only gemma3's has it
    window = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = model(input_ids=window[None], use_cache=False).logits[0, :-1]
        parts = list(predictions(model, window))
        again = model(input_ids=window[None], use_cache=False).logits[0, :-1]
    assert [len(part) for part in parts] == [16, 16, 7]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole, again)


@pytest.mark.usefixtures("_sixteen_tokens_at_a_time")
def test_a_body_that_was_wrapped_stays_so(tiny_checkpoint: Callable[..., Path]) -> None:
    model = open_model(tiny_checkpoint("llama"), "cpu", torch.float32)
    inner, calls = model.model.forward, []
    model.model.forward = wrapped = lambda *arguments, **options: (
        calls.append(1) or inner(*arguments, **options)
    )
    with torch.inference_mode():
        list(predictions(model, torch.arange(40)))
    assert calls == [1]
    assert model.model.forward is wrapped


def test_figures_are_those_of_whole_windows(
    tiny_checkpoint: Callable[..., Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)

    def measured() -> dict[str, float]:
        found = evaluate(one, base=other, text=text, seqlen=64, device="cpu")
        return {name: value for name, value in found.items() if isinstance(value, float)}

    whole = measured()
    monkeypatch.setattr(streaming, "LOGIT_BYTES", 20 * 4 * VOCABULARY)
    assert measured() == pytest.approx(whole, rel=1e-5)
