"""vLLM on an artifact predicts what it predicts on the same weights in dense form.

`make vllm-check` runs these tests in an environment with vLLM for the CPU. They compute in float32: what is wrong
(parts in another order, a lost bias, an expert that is not masked) changes log-probabilities by more than 0.05.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("vllm")

from vllm_agreement import difference, generated_in_vllm, in_transformers, in_vllm
from vllm_cases import AGREEMENT, Case, tokens

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_it_agrees_with_the_decoded_weights(family: str, case: Callable[[str], Case]) -> None:
    folders = case(family)
    of_artifact = in_vllm(folders.artifact, tokens())
    assert difference(of_artifact, in_vllm(folders.decoded, tokens())) < AGREEMENT
    assert difference(of_artifact, in_transformers(folders.artifact, tokens())) < AGREEMENT


def test_deepseek_v3_agrees_with_transformers(case: Callable[[str], Case]) -> None:
    """Merged latent projections, stacks of experts, and a pruned expert that the router avoids."""
    folders = case("deepseek_v3")
    of_artifact = in_vllm(folders.artifact, tokens())
    assert difference(of_artifact, in_transformers(folders.artifact, tokens())) < AGREEMENT
    # The router of the decoded model chooses the expert of zeros: the artifact's must not.
    assert difference(of_artifact, in_vllm(folders.decoded, tokens())) > 10 * AGREEMENT


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_it_agrees_with_transformers_when_compiled(family: str, case: Callable[[str], Case]) -> None:
    """As `vllm serve` runs a model. Without `inductor.keep_order_of_writes` torch reads a router's logits too early."""
    artifact = case(family).artifact
    compiled = in_vllm(artifact, tokens(), enforce_eager=False)
    assert torch.isfinite(compiled).all()
    assert difference(compiled, in_transformers(artifact, tokens())) < AGREEMENT


def test_single_tokens_agree_with_transformers(case: Callable[[str], Case]) -> None:
    """vLLM computes the tokens after a prompt with two dense factors that it makes of `kv_b_proj`."""
    artifact, prompts = case("deepseek_v3").artifact, tokens()[:, :32]
    ids, found = generated_in_vllm(artifact, prompts, 12)
    expected = in_transformers(artifact, torch.cat([prompts, ids], dim=1))[:, prompts.shape[1] - 1 :]
    assert difference(found, expected) < AGREEMENT


def test_a_softmax_router_avoids_a_pruned_expert(case: Callable[[str], Case]) -> None:
    """Experts of a model that vLLM loads by its own loader of experts, behind a router without a correction bias."""
    folders = case("qwen2_moe")
    of_artifact = in_vllm(folders.artifact, tokens())
    assert difference(of_artifact, in_transformers(folders.artifact, tokens())) < AGREEMENT
