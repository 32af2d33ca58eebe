"""LoRA on compressed modules through PEFT: gradients, saving and loading, plain PEFT on the dense model, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ciuic_cli
from ciuic_cli.errors import UsageError

peft = pytest.importorskip("peft")

LINEARS = r".*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(
        **{
            "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": LINEARS,
            "target_parameters": STACKS, **options,
        }
    )  # fmt: skip


def adapted(folder: Path, **options: Any) -> Any:
    """A compressed float32 model with an adapter whose every factor is random."""
    torch.manual_seed(0)
    model = peft.get_peft_model(ciuic_cli.load(folder, dtype=torch.float32), lora(**options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)
    return model.eval()


def logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=prompt).logits.float()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"q_b_proj": 16}},
        {"lora_dropout": 0.5, "target_parameters": None},
    ],
)
def test_the_adapter_is_the_same_in_plain_peft_on_the_dense_model(
    artifact: Callable[..., Any], prompt: torch.Tensor, tmp_path: Path, options: dict[str, Any]
) -> None:
    built = artifact("deepseek_v3")
    model = adapted(built.folder, **options)
    found = logits(model, prompt)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        ciuic_cli.load(built.folder, dtype=torch.float32), tmp_path / "adapter"
    )
    assert torch.equal(logits(again.eval(), prompt), found)
    with again.disable_adapter():
        without = logits(again, prompt)
    assert (without - found).abs().max() > 0.05, "the adapter changes nothing"
    dense = peft.PeftModel.from_pretrained(built.dense_model(), tmp_path / "adapter").eval()
    assert (logits(dense, prompt) - found).abs().max() <= 1e-3


def test_gradients_are_those_of_the_dense_model(
    artifact: Callable[..., Any], prompt: torch.Tensor, tmp_path: Path
) -> None:
    built = artifact("deepseek_v3")
    model = adapted(built.folder)
    model.save_pretrained(tmp_path / "adapter")
    dense = peft.PeftModel.from_pretrained(built.dense_model(), tmp_path / "adapter", is_trainable=True)
    gradients = []
    for trained in (model, dense):
        trained.zero_grad()
        trained(input_ids=prompt, labels=prompt).loss.backward()
        gradients.append({name: p.grad for name, p in trained.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert sum("experts" in name for name in gradients[0]) >= 4
    for name, gradient in gradients[1].items():
        ours = gradients[0][name]
        assert ours is not None, name
        assert (ours - gradient).norm() <= 2e-3 * gradient.norm() + 1e-7, name


def test_two_active_adapters_add_up(artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    model = adapted(artifact("deepseek_v3").folder)
    once = logits(model, prompt)
    model.add_adapter("second", lora())
    model.base_model.set_adapter(["default", "second"])
    assert torch.equal(logits(model, prompt), once)  # the second one's B is zero
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)
    assert not torch.equal(logits(model, prompt), once)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_dora": True, "target_parameters": None}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"fan_in_fan_out": True, "target_parameters": None}, "fan_in_fan_out"),
        ({"use_qalora": True, "target_parameters": None}, "use_qalora"),
        ({"target_modules": ["embed_tokens"], "target_parameters": None}, "CompressedEmbedding"),
        ({"target_modules": ["experts"], "target_parameters": None}, "by stack"),
    ],
)
def test_what_does_not_work_on_codes_is_refused(
    artifact: Callable[..., Any], options: dict[str, Any], named: str
) -> None:
    model = ciuic_cli.load(artifact("deepseek_v3").folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UsageError, match=named):
            peft.get_peft_model(model, lora(**options))


def test_dropout_drops_inputs_in_training_only(artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    model = adapted(artifact("deepseek_v3").folder, lora_dropout=0.5, target_parameters=None)
    assert torch.equal(logits(model, prompt), logits(model, prompt))
    model.train()
    assert not torch.equal(logits(model, prompt), logits(model, prompt))


def test_merging_is_refused(artifact: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="cannot be merged"):
        adapted(artifact("deepseek_v3").folder).merge_and_unload()
