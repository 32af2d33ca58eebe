"""Predictions in parts, in memory and layer by layer, equal those of the whole window for all families."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import TINY_CONFIGS, VOCABULARY

from ciuic_cli.compression.pipeline import compress
from ciuic_cli.evaluation import perplexity
from ciuic_cli.evaluation.logits import loaded, streamed
from ciuic_cli.evaluation.opening import expected_bytes, open_model
from ciuic_cli.evaluation.perplexity import evaluate
from ciuic_cli.layerwise import logits as layer_logits


@pytest.fixture
def _sixteen_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_logits, "LEAST_TOKENS", 1)
    monkeypatch.setattr(layer_logits, "LOGIT_BYTES", 16 * 4 * VOCABULARY)


WINDOW = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))
CONFIG = Path("config.json")


@pytest.mark.usefixtures("_sixteen_tokens_at_a_time")
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_parts_make_up_the_whole(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    model = open_model(tiny_checkpoint(family), "cpu", torch.float32)
    model.config.final_logit_softcapping = 2.0  # applied after the head; only gemma3 uses it
    with torch.inference_mode():
        whole = model(input_ids=WINDOW[None], use_cache=False).logits[0, :-1]
        parts = list(loaded(model, [WINDOW], CONFIG)(0))
        again = model(input_ids=WINDOW[None], use_cache=False).logits[0, :-1]
    assert [len(part) for part in parts] == [16, 16, 7]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole, again)


@pytest.mark.usefixtures("_sixteen_tokens_at_a_time")
def test_a_wrapped_body_stays_wrapped(tiny_checkpoint: Callable[..., Path]) -> None:
    model = open_model(tiny_checkpoint("llama"), "cpu", torch.float32)
    inner, calls = model.model.forward, []

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return inner(*arguments, **options)

    model.model.forward = wrapped
    with torch.inference_mode():
        list(loaded(model, [WINDOW], CONFIG)(0))
    assert len(calls) == 1
    assert model.model.forward is wrapped


@pytest.mark.usefixtures("_sixteen_tokens_at_a_time")
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_a_checkpoint_layer_by_layer_predicts_the_same(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    folder, device = tiny_checkpoint(family), torch.device("cpu")
    windows = [WINDOW, WINDOW[:33]]  # the second ends with a part of one token, which predicts nothing
    model = open_model(folder, "cpu", torch.float32)
    steps: list[tuple[str, int, int]] = []
    with (
        torch.inference_mode(),
        streamed(folder, windows, device, torch.float32, lambda *step: steps.append(step)) as predict,
    ):
        for number, sizes in enumerate([[16, 16, 7], [16, 16]]):
            parts, expected = list(predict(number)), list(loaded(model, windows, CONFIG)(number))
            assert [len(part) for part in parts] == sizes
            torch.testing.assert_close(torch.cat(parts), torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert steps[-1] == ("layers", len(steps), len(steps))


def _numbers(found: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in found.items() if isinstance(value, float)}


def test_metrics_in_parts_equal_those_of_whole_windows(
    tiny_checkpoint: Callable[..., Path], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=1)
    whole = evaluate(one, base=other, text=text, seqlen=64, device="cpu")
    monkeypatch.setattr(layer_logits, "LEAST_TOKENS", 1)
    monkeypatch.setattr(layer_logits, "LOGIT_BYTES", 20 * 4 * VOCABULARY)
    found = evaluate(one, base=other, text=text, seqlen=64, device="cpu")
    assert _numbers(found) == pytest.approx(_numbers(whole), rel=1e-5)


def test_a_checkpoint_that_does_not_fit_runs_layer_by_layer(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact fits; its original does not, as base and as model."""
    original, out = tiny_checkpoint("deepseek_v3"), tmp_path / "out"
    compress(
        original,
        out,
        ratio=2.5,
        calibration=text,
        calibration_only=True,
        nsamples=4,
        seqlen=64,
        effort="fast",
    )
    options = {"text": text, "seqlen": 64, "limit": 4, "device": "cpu"}
    expected = evaluate(out, base=original, **options), evaluate(original, **options)
    monkeypatch.setattr(perplexity, "free_memory", lambda place: 2 * expected_bytes(out, None))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hints: list[str] = []
    found = evaluate(out, base=original, **options, hint=hints.append), evaluate(original, **options)
    for one, other in zip(found, expected, strict=True):
        assert _numbers(one) == pytest.approx(_numbers(other), rel=1e-4)
        assert one["dtype"] == other["dtype"] == "float32"
    assert [str(original) in line and "layer by layer" in line for line in hints] == [True]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
