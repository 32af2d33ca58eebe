"""CompressedExperts against transformers' dense modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_weights import as_tensor, dense, random_codes, relative_error
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3Experts
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHExperts

from ciuic_cli.checkpoint.compressible import experts_fault
from ciuic_cli.codecs import trellis
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.errors import InputError
from ciuic_cli.runtime.experts import CompressedExperts

E, H, I = 4, 56, 24  # noqa: E741


def v3() -> nn.Module:
    config = DeepseekV3Config(hidden_size=H, moe_intermediate_size=I, n_routed_experts=E)
    config._experts_implementation = "eager"
    return DeepseekV3Experts(config)


def v4() -> nn.Module:
    config = DeepseekV4Config(hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, swiglu_limit=0.4)
    config._experts_implementation = "eager"
    return DeepseekV4Experts(config)


def compressed(module: Any, rank: int = 0, prune: int | None = None) -> CompressedExperts:
    """CompressedExperts with random codes; sets the dense module's weights to the decoded values."""
    blobs = []
    for name in ("gate_up_proj", "down_proj"):
        parameter = getattr(module, name)
        experts = [
            random_codes(
                *parameter.shape[1:], 0 if e == prune else [4, 3, 5], rank=rank, seed=e, is_sorted=e % 2 == 1
            )
            for e in range(E)
        ]
        parameter.data = torch.stack([dense(expert) for expert in experts])
        blobs.append(nn.Parameter(as_tensor(ExpertStack(tuple(experts))), requires_grad=False))
    return CompressedExperts(module, *blobs)


def routing(tokens: int, k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(E, generator=draw)[:k] for _ in range(tokens)])
    return torch.randn(tokens, H, generator=draw), ids, torch.rand(tokens, k, generator=draw)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 7, 200])
@pytest.mark.parametrize("make", [v3, v4])
def test_same_results_as_the_dense_module(make: Any, tokens: int) -> None:
    module = make()
    packed = compressed(module, rank=3)
    x, ids, weights = routing(tokens)
    assert relative_error(packed(x, ids, weights), module(x, ids, weights)) < 1e-3
    half = packed(x.to(torch.bfloat16), ids, weights)
    assert half.dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("make", [v3, v4])
def test_float32_is_exact_where_each_expert_gets_few_of_many_tokens(make: Any) -> None:
    """As exact as a dense float32 module: no activation is rounded to 15 bits."""
    module = make()
    packed = compressed(module)
    x, ids, weights = routing(60)  # about 30 for each expert
    assert relative_error(packed(x, ids, weights), module(x, ids, weights)) < 3e-6


@torch.no_grad()
def test_the_clamp_changes_the_result() -> None:
    module = v4()
    packed = compressed(module)
    x, ids, weights = routing(5)
    packed.limit = module.limit = 100.0
    free = packed(x, ids, weights)
    packed.limit = 0.4
    assert relative_error(packed(x, ids, weights), free) > 0.01


def test_only_routed_experts_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = compressed(v3(), prune=2)
    seen: list[int] = []

    def spy(factor: trellis.Factor, x: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
        seen.append(factor.packed.header.seed)  # the expert's number
        return multiply(factor, x, *options, **named)

    multiply = trellis.Factor.multiply
    monkeypatch.setattr(trellis.Factor, "multiply", spy)
    x, _, weights = routing(2)
    packed(x, torch.tensor([[3, 2], [3, 2]]), weights)
    assert seen == [3, 3]  # gate_up and down of expert 3; expert 2 is pruned


@torch.no_grad()
def test_indices_beyond_the_last_expert_add_nothing() -> None:
    module = v3()
    packed = compressed(module)
    x, ids, weights = routing(6)
    ids[2:4, 1] = E
    assert relative_error(packed(x, ids, weights), module(x, ids, weights)) < 1e-3


def test_layouts_that_stacks_cannot_express() -> None:
    size = {"hidden_size": 32, "num_hidden_layers": 1}
    oss = GptOssExperts(GptOssConfig(**size, intermediate_size=16, num_local_experts=2))
    nemotron = NemotronHExperts(
        NemotronHConfig(**size, moe_intermediate_size=16, n_routed_experts=2, moe_latent_size=None)
    )
    assert "(inputs, outputs)" in str(experts_fault(oss))
    assert "gate_up_proj" in str(experts_fault(nemotron))
    assert "gate_up_proj" in str(experts_fault(nn.Linear(3, 3)))
    assert experts_fault(v4()) is None
    with pytest.raises(InputError, match="GptOssExperts cannot hold"):
        CompressedExperts(oss, oss.gate_up_proj, oss.down_proj)
