"""Routers never choose a pruned expert, in every family that has routed experts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from packed_weights import as_tensor, random_codes, relative_error
from tiny_checkpoints import TINY_CONFIGS
from transformers import AutoModelForCausalLM

from ciuic_cli import load
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.runtime import routing
from ciuic_cli.runtime.loading import pack_module_inplace

ROUTED = [name for name, config in TINY_CONFIGS.items() if "num_experts_per_tok" in config]
PRUNED = 1
LIMITED = {"topk_method": "group_limited_greedy", "n_routed_experts": 6, "n_group": 2, "topk_group": 1}


def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _chosen(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts chosen in each layer, by the name of its experts module."""
    chosen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _m, args, kwargs, name=name: chosen.update({name: [*args, *kwargs.values()][1]}),
                with_kwargs=True,
            )
    with torch.no_grad():
        model(ids)
    return chosen


def _ids() -> torch.Tensor:
    return torch.randint(3, 263, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("family", "changes"), [*((family, {}) for family in ROUTED), ("deepseek_v2", LIMITED)]
)
def test_a_pruned_expert_is_never_chosen(
    tiny_checkpoint: Callable[..., Path], family: str, changes: dict[str, Any]
) -> None:
    model = _model(tiny_checkpoint(family, **changes))
    before = _chosen(copy.deepcopy(model), _ids())
    blobs = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            count, rows, cols = parameter.shape
            experts = [random_codes(rows, cols, 0 if e == PRUNED else 4, seed=e) for e in range(count)]
            blobs[name] = as_tensor(ExpertStack(tuple(experts)))
    after = _chosen(pack_module_inplace(model, blobs), _ids())
    choosing = [name for name in after if not hasattr(model.get_submodule(name[:-7] + "gate"), "tid2eid")]
    assert choosing and before.keys() == after.keys()
    assert any((before[name] == PRUNED).any() for name in choosing)
    for name in choosing:
        assert not (after[name] == PRUNED).any()
        assert after[name].shape == before[name].shape
        assert all(len(row.unique()) == len(row) for row in after[name])


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral", "qwen2_moe"])
def test_a_softmax_runs_over_the_experts_that_are_left(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    model = _model(tiny_checkpoint(family))
    router = next(m for n, m in model.named_modules() if n.endswith("mlp.gate") and hasattr(m, "top_k"))
    x = torch.randn(50, router.hidden_dim, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(router.num_experts) == PRUNED
    logits = x @ router.weight.T
    logits[:, mask] = -torch.inf
    weights = logits.softmax(-1).topk(router.top_k).values
    if family == "mixtral":
        weights = weights / weights.sum(-1, keepdim=True)
    original = type(router)
    routing.mask_router(router, mask)
    routing.mask_router(router, mask)
    _, scores, chosen = router(x)
    scale = getattr(router, "routed_scaling_factor", 1.0)
    order = scores.sort(descending=True).values
    torch.testing.assert_close(order, weights * scale)
    assert not (chosen == PRUNED).any()
    routing.unmask_router(router)
    assert type(router) is original and "masked_logits" not in dict(router.named_buffers())
    assert (router(x)[2] == PRUNED).any()


def test_a_router_behind_hooks_is_masked(tiny_checkpoint: Callable[..., Path]) -> None:
    """accelerate, which distributes a model over devices, stores each module's forward and calls it from a wrapper."""
    model = _model(tiny_checkpoint("mixtral"))
    router = next(m for n, m in model.named_modules() if n.endswith("mlp.gate"))
    x = torch.randn(50, router.hidden_dim, generator=torch.Generator().manual_seed(1))
    add_hook_to_module(router, ModelHook())
    assert (router(x)[2] == PRUNED).any()
    routing.mask_router(router, torch.arange(router.num_experts) == PRUNED)
    assert not (router(x)[2] == PRUNED).any()
    routing.unmask_router(router)
    assert (router(x)[2] == PRUNED).any()


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral"])
def test_a_model_with_masked_routers_is_pickled_saved_and_copied(
    family: str, artifact: Callable[..., Any], tmp_path: Path
) -> None:
    """Routers without biases get a mixed class, which no module contains by name."""
    model = _model(artifact(family).folder)
    torch.save(model, tmp_path / "model.pt")
    again = (
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
        copy.deepcopy(model),
    )
    before = _chosen(model, _ids())
    for other in again:
        routers = [m for m in other.modules() if isinstance(m, routing._MaskedLogits)]
        assert routers and not {id(m) for m in routers} & {id(m) for m in model.modules()}
        with torch.no_grad():
            assert torch.equal(other(_ids()).logits, model(_ids()).logits)
        chosen = _chosen(other, _ids())
        assert chosen.keys() == before.keys()
        assert all(torch.equal(chosen[name], before[name]) for name in chosen)
        routing.unmask_router(routers[0])
        assert not isinstance(routers[0], routing._MaskedLogits)


def test_enough_experts_stay_unmasked() -> None:
    pruned = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
    assert routing.mask_for(pruned, top_k=3).tolist() == pruned.tolist()
    assert not routing.mask_for(pruned, top_k=4).any()
    grouped = routing.mask_for(pruned, top_k=2, groups=2, chosen_groups=1)
    assert grouped.tolist() == [True, True, False, False, False, False, False, False]


def test_a_mask_for_one_layer(tiny_checkpoint: Callable[..., Path]) -> None:
    model = _model(tiny_checkpoint("mixtral"))
    layer = model.model.layers[1]
    context = routing.masking({"model.layers.1.mlp.experts": torch.tensor([False, True, False])})
    x = torch.randn(30, 48, generator=torch.Generator().manual_seed(1))
    with context("model.layers.1.", layer):
        assert not (layer.mlp.gate(x)[2] == PRUNED).any()
    assert (layer.mlp.gate(x)[2] == PRUNED).any()
    with context("model.layers.0.", model.model.layers[0]):
        assert not isinstance(model.model.layers[0].mlp.gate, routing._MaskedLogits)


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "mixtral"])
def test_models_with_pruned_experts_compile_without_a_graph_break(
    family: str, artifact: Callable[..., Any]
) -> None:
    torch._dynamo.reset()
    model = load(artifact(family).folder, device="cpu", dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    ids = torch.randint(0, 260, (1, 7), generator=torch.Generator().manual_seed(3))
    # Compiled code attends by torch, whose sums differ; products round what they read.
    assert relative_error(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits) < 1e-3
