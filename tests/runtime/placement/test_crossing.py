"""Models in two memories: same logits as on one device, and only hidden states cross."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from packed_weights import relative_error
from second_device import DEVICE, Copy, OnDevice, SecondDevice
from transformers import AutoModelForCausalLM

from ciuic_cli import load
from ciuic_cli.runtime.experts import CompressedExperts
from ciuic_cli.runtime.placement.choice import covering

pytestmark = pytest.mark.filterwarnings("ignore:ciuic has no kernels for second devices:RuntimeWarning")


@pytest.fixture
def second_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondDevice]:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the mode holds in this thread only
    with torch.no_grad(), SecondDevice() as device:
        yield device


def expert_modules(model: Any) -> dict[str, CompressedExperts]:
    return {name: m for name, m in model.named_modules() if isinstance(m, CompressedExperts)}


def with_experts_on_cpu(built: Any, **options: Any) -> tuple[Any, Any]:
    """The model with its routed experts in main memory, and the same model on the CPU."""
    plain = load(built.folder, device="cpu", **options)
    places = covering(plain, dict.fromkeys(expert_modules(plain), "cpu"), str(DEVICE))
    return AutoModelForCausalLM.from_pretrained(
        built.folder, device_map=places, **(options or {"dtype": "auto"})
    ), plain


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "deepseek_v4", "mixtral"])
def test_same_logits_with_experts_in_main_memory(
    family: str, artifact: Callable[..., Any], prompt: torch.Tensor, second_device: SecondDevice
) -> None:
    model, plain = with_experts_on_cpu(artifact(family), dtype=torch.float32)
    on_cpu = {name for name, p in model.named_parameters() if not isinstance(p, OnDevice)}
    assert on_cpu and all(".experts." in name for name in on_cpu)
    found = model(prompt.to(DEVICE)).logits
    assert found.device == DEVICE
    assert relative_error(found.cpu(), plain(prompt).logits) < 1e-3


def test_only_hidden_states_cross(artifact: Callable[..., Any], second_device: SecondDevice) -> None:
    """Per token and MoE layer: the hidden state to main memory and back, and the router's choice."""
    model, _ = with_experts_on_cpu(artifact("deepseek_v3"))
    config = model.config
    token = torch.tensor([[5]]).to(DEVICE)
    cache = model(torch.tensor([[5, 9, 11]]).to(DEVICE)).past_key_values
    second_device.copies.clear()
    model(token, past_key_values=cache)
    layers = len(expert_modules(model))
    assert layers == config.num_hidden_layers - config.first_k_dense_replace > 0
    k, hidden = config.num_experts_per_tok, config.hidden_size
    state = [Copy((1, hidden), torch.bfloat16, 2 * hidden, direction) for direction in (False, True)]
    choice = [copy for copy in second_device.copies if copy.shape == (1, k)]
    rest = sorted(copy for copy in second_device.copies if copy not in choice)
    assert rest == sorted(layers * state)
    assert sum(copy.nbytes for copy in rest) == layers * 2 * hidden * 2
    assert len(choice) == 2 * layers and sum(copy.nbytes for copy in choice) <= layers * k * 12


def test_generation(artifact: Callable[..., Any], prompt: torch.Tensor, second_device: SecondDevice) -> None:
    model, plain = with_experts_on_cpu(artifact("deepseek_v3"), dtype=torch.float32)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(prompt.to(DEVICE), **options)
    assert torch.equal(found.cpu(), plain.generate(prompt, **options))


def test_whole_layers_in_main_memory(
    artifact: Callable[..., Any], prompt: torch.Tensor, second_device: SecondDevice
) -> None:
    """Buffers return to main memory, too; accelerate's hooks are gone from all modules but the model."""
    built = artifact("deepseek_v3")
    plain = load(built.folder, device="cpu", dtype=torch.float32)
    last = len(plain.model.layers) - 1
    places = covering(plain, {f"model.layers.{last}": "cpu"}, str(DEVICE))
    model = AutoModelForCausalLM.from_pretrained(built.folder, device_map=places, dtype=torch.float32)
    layer = model.model.layers[last]
    assert not any(isinstance(t, OnDevice) for t in (*layer.parameters(), *layer.buffers()))
    assert [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")] == [""]
    output = model(prompt.to(DEVICE), use_cache=True)
    assert relative_error(output.logits.cpu(), plain(prompt).logits) < 1e-3
    kinds = [isinstance(cached.keys, OnDevice) for cached in output.past_key_values.layers]
    assert kinds == [True] * last + [False]


@pytest.mark.parametrize(
    ("family", "share"),
    [("deepseek_v3", 0.4), ("deepseek_v3", 0.7), ("deepseek_v3", 2.0), ("llama_tied", 0.6)],
)
def test_gpu_memory(
    family: str, share: float, artifact: Callable[..., Any], prompt: torch.Tensor, second_device: SecondDevice
) -> None:
    built = artifact(family)
    total = sum(t.nbytes for t in built.stored.values())
    limit, said = int(share * total), []
    model = load(built.folder, device=str(DEVICE), dtype=torch.float32, gpu_memory=limit, hint=said.append)
    on_gpu = sum(p.nbytes for p in model.parameters() if isinstance(p, OnDevice))
    assert on_gpu <= limit
    in_memory = {name for name, p in model.named_parameters() if not isinstance(p, OnDevice)}
    assert bool(in_memory) == (share < 1)
    assert len(said) == 1 and str(DEVICE) in said[0]
    plain = load(built.folder, device="cpu", dtype=torch.float32)
    assert relative_error(model(prompt.to(DEVICE)).logits.cpu(), plain(prompt).logits) < 1e-3
