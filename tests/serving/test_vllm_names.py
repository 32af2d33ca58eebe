"""vLLM's modules and the artifact's tensors. vLLM itself is tested by `make vllm-check` (tests/serving/in_vllm)."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch

from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import blob_of, random_matrix
from ciuic_cli.serving.vllm import names
from ciuic_cli.serving.vllm.local_experts import local_stack, routed_sum

LAYER = "model.layers.3"
DEEPSEEK = {
    f"{LAYER}.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")
} | {f"{LAYER}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}


def test_a_merged_linear_has_its_parts_in_the_order_of_the_rows() -> None:
    stored = {f"{LAYER}.self_attn.{part}_proj.weight" for part in "vkq"}
    assert names.linear_tensors(f"{LAYER}.self_attn.qkv_proj", stored) == tuple(
        f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"
    )
    fused = names.linear_tensors(f"{LAYER}.self_attn.fused_qkv_a_proj", DEEPSEEK, merged={})
    assert [name.split(".")[-2] for name in fused] == ["q_a_proj", "kv_a_proj_with_mqa"]


def test_a_linear_that_the_files_have_whole_is_not_merged() -> None:
    stored = {f"{LAYER}.self_attn.qkv_proj.weight"}
    assert names.linear_tensors(f"{LAYER}.self_attn.qkv_proj", stored) == (*stored,)
    assert names.linear_tensors(f"{LAYER}.self_attn.o_proj", stored) == ()


def test_a_partly_compressed_merge_names_all_its_parts() -> None:
    stored = {f"{LAYER}.mlp.up_proj.weight"}
    found = names.linear_tensors(f"{LAYER}.mlp.gate_up_proj", stored)
    assert [name.split(".")[-2] for name in found] == ["gate_proj", "up_proj"]


def test_the_embedding_without_a_name_is_found() -> None:
    stored = {"model.embed_tokens.weight", "lm_head.weight", f"{LAYER}.mlp.up_proj.weight"}
    assert names.embedding_tensor("", stored) == "model.embed_tokens.weight"
    assert names.embedding_tensor("lm_head", stored) == "lm_head.weight"
    assert names.embedding_tensor("lm_head", stored - {"lm_head.weight"}) is None
    assert names.embedding_tensor("", {"a.embed_tokens.weight", "b.embed_tokens.weight"}) is None


def test_experts_need_both_stacks() -> None:
    prefix = f"{LAYER}.mlp.experts"
    expected = {"w13": f"{prefix}.gate_up_proj", "w2": f"{prefix}.down_proj"}
    assert names.expert_tensors(prefix, DEEPSEEK) == expected
    assert names.expert_tensors(f"{prefix}.routed_experts", DEEPSEEK) == expected
    assert names.expert_tensors(prefix, DEEPSEEK - {f"{prefix}.down_proj"}) == {}


def test_layers_and_renamed_modules() -> None:
    assert names.layer_of(f"{LAYER}.mlp.up_proj.weight") == f"{LAYER}."
    assert names.layer_of("model.embed_tokens.weight") is None
    assert names.renamed(f"{LAYER}.mlp.experts.down_proj", "mixtral") == (
        f"{LAYER}.block_sparse_moe.experts.down_proj"
    )
    assert names.renamed(f"{LAYER}.mlp.experts.down_proj", "deepseek_v3") == f"{LAYER}.mlp.experts.down_proj"
    assert names.expands_latents(f"{LAYER}.self_attn.kv_b_proj")
    assert not names.expands_latents(f"{LAYER}.self_attn.q_b_proj")


@pytest.mark.parametrize("expert_map", [[-1, 1, -1, 0, 2], [0, -1, -1, -1, -1]])
def test_a_process_keeps_the_bytes_of_its_own_experts(expert_map: list[int]) -> None:
    experts = tuple(random_matrix(32, 48, (2, 4), seed=number) for number in range(5))
    stack = ExpertStack(experts)
    kept = ExpertStack.from_buffer(local_stack(stack, blob_of(stack), torch.tensor(expert_map)), where="kept")
    by_number = {number: expert for expert, number in enumerate(expert_map) if number >= 0}
    assert len(kept.experts) == len(by_number)
    for number, expert in by_number.items():
        assert kept.experts[number].to_bytes() == experts[expert].to_bytes()


def test_the_sums_of_two_processes_are_the_sum_of_all_experts() -> None:
    gate_up = ExpertStack(tuple(random_matrix(64, 48, seed=number) for number in range(5)))
    down = ExpertStack(tuple(random_matrix(48, 32, seed=number) for number in range(5)))
    whole = (blob_of(gate_up), blob_of(down))
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(7, 48, generator=generator), torch.rand(7, 2, generator=generator)
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(7)])

    def output(expert_map: torch.Tensor | None) -> torch.Tensor:
        own = tuple(
            local_stack(stack, blob, expert_map) for stack, blob in zip((gate_up, down), whole, strict=True)
        )
        return routed_sum(x, own, (64, 48), ids, weights, torch.nn.functional.silu, expert_map)

    halves = [output(torch.tensor(own)) for own in ([0, -1, 1, -1, 2], [-1, 0, -1, 1, -1])]
    everything = output(None)
    assert everything.norm() > 0 and min(half.norm() for half in halves) > 0
    assert torch.allclose(
        halves[0] + halves[1], everything, rtol=1e-4, atol=1e-5 * float(everything.abs().max())
    )


def test_one_process_keeps_the_whole_stack() -> None:
    stack = ExpertStack((random_matrix(16, 32), random_matrix(16, 32, seed=1)))
    blob = blob_of(stack)
    kept = local_stack(stack, blob, None)
    assert torch.equal(kept, blob) and kept.data_ptr() != blob.data_ptr()  # the file's memory is not kept


def test_the_entry_point_leads_to_the_plug_in() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["ciuic"].partition(":")
    assert callable(getattr(import_module(module), function))
