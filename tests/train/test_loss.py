"""Cross entropy in chunks: transformers' loss and gradients, and no logits of a whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ciuic_cli
from ciuic_cli.train import loss
from ciuic_cli.train.examples import IGNORED
from ciuic_cli.train.planning.measured import peak_bytes

peft = pytest.importorskip("peft")


@pytest.fixture
def model(artifact: Callable[..., Any]) -> Any:
    base = ciuic_cli.load(artifact("llama").folder, device="cpu", dtype=torch.float32)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)
    return adapted


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :15] = IGNORED
    return ids, labels


@pytest.mark.parametrize("rows", [1, 16, 1000])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_loss_and_gradients_are_those_of_transformers(
    model: Any,
    batch: tuple[torch.Tensor, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    cap: float | None,
) -> None:
    """`cap`: a model that changes the logits after its head."""
    ids, labels = batch
    causal = model.get_base_model()
    if cap is not None:
        original = type(causal).forward

        def capped(*arguments: Any, labels: torch.Tensor | None = None, **options: Any) -> Any:
            outputs = original(causal, *arguments, **options)
            outputs.logits = cap * torch.tanh(outputs.logits / cap)
            if labels is not None:
                outputs.loss = causal.loss_function(outputs.logits, labels, causal.config.vocab_size)
            return outputs

        monkeypatch.setattr(causal, "forward", capped)
    monkeypatch.setattr(loss, "LOGITS_PER_CHUNK", rows * causal.config.vocab_size)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted = model(input_ids=ids, labels=labels).loss
    gradients = torch.autograd.grad(wanted, trained)
    found = loss.chunked_loss(model, {"input_ids": ids}, labels)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    for ours, exact in zip(torch.autograd.grad(found, trained), gradients, strict=True):
        assert (ours - exact).norm() <= 2e-3 * exact.norm()
    assert "forward" not in vars(causal.base_model), "the decoder was not restored"
    with torch.no_grad():
        half = loss.chunked_loss(model, {"input_ids": ids}, labels, 2 * int((labels[:, 1:] != IGNORED).sum()))
    assert half.item() == pytest.approx(wanted.item() / 2, rel=1e-4)


def test_the_head_sees_at_most_a_chunk(
    model: Any, batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, labels = batch
    causal, seen = model.get_base_model(), []
    monkeypatch.setattr(loss, "LOGITS_PER_CHUNK", 16 * causal.config.vocab_size)
    causal.get_output_embeddings().register_forward_pre_hook(
        lambda module, arguments: seen.append(arguments[0].shape[:-1].numel())
    )
    loss.chunked_loss(model, {"input_ids": ids}, labels).backward()
    assert seen == [2, 16, 16, 16, 16]  # 64 of 78 tokens are learned


def test_the_head_has_one_gradient_while_the_loss_lives(
    tiny_checkpoint: Callable[..., Path], batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """The backward pass takes over the sums of the forward pass instead of copying them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"), dtype=torch.float32)
    model.model.requires_grad_(False)
    found = loss.chunked_loss(model, {"input_ids": batch[0]}, batch[1])
    taken = peak_bytes(found.backward)
    assert model.lm_head.weight.grad is not None and model.lm_head.weight.grad.abs().max() > 0
    assert taken < model.lm_head.weight.nbytes / 4 and found.requires_grad
