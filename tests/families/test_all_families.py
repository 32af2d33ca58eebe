"""One family for each mechanism that a model class may need, at 4:1; `family_table.py` tries all of transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_table import try_family

MECHANISMS = {
    "gpt2": "Conv1D: weights as (inputs, outputs)",
    "gpt_oss": "transposed experts with biases",
    "llama4_text": "all experts in one bmm",
    "jamba": "state-space layers, and weights that other code reads",
    "mamba": "a head whose dtype is read",
    "recurrent_gemma": "block-diagonal gates in one baddbmm",
    "bloom": "a layer that returns a tuple",
    "gpt_bigcode": "positional arguments of layers",
    "glm_moe_dsa": "a layer's second output goes into the next layer",
    "gemma3n_text": "streams before sequences, and keys and values of earlier layers",
    "longcat_flash": "a config that counts other layers than the model has",
    "camembert": "a head, tied to the embedding, that comes before it",
    "rembert": "an embedding of another width than the layers",
    "moshi": "an embedding with more rows than the head",
    "roformer": "a table that is not trained",
    "rwkv": "a tuple that grows before it is returned, and weights that the model rescales",
    "openai-gpt": "a layer that returns a list",
    "dbrx": "experts one after another in a flat matrix",
}

STATE_SPACES = (
    "mamba2", "falcon_mamba", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "zamba2", "qwen3_next",
)  # fmt: skip
"""Families with state-space layers, or other layers without attention, beside those of MECHANISMS."""
WRAPPERS = ("qwen3_vl", "qwen3_5", "deepseek_vl_hybrid", "llava", "idefics3")
"""Language models with a vision tower whose logits `test_towers.py` does not compare."""


@pytest.mark.parametrize("family", (*MECHANISMS, *STATE_SPACES))
def test_a_family_is_as_exact_as_its_dense_model(family: str, tmp_path: Path) -> None:
    result = try_family(family, tmp_path)
    assert result.code == 0, result.reason
    assert result.works, result.difference
    assert result.share > 0.95 and result.ratio >= 4.0


@pytest.mark.parametrize("family", WRAPPERS)
def test_the_language_model_of_a_wrapper_is_compressed(family: str, tmp_path: Path) -> None:
    result = try_family(family, tmp_path)
    assert result.code == 0, result.reason
    assert result.works, result.difference
    assert result.ratio >= 4.0 and 0.9 < result.share < 1
    assert "not part of the language model: kept exactly" in result.reason


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("hrm_text", "HrmTextForCausalLM does not run its 3 layers once each"),
        # transformers itself fails: the wrapper reads an attribute that its language model's output lacks.
        (
            "llama4",
            "transformers cannot run the model: AttributeError in Llama4ForConditionalGeneration.forward",
        ),
        ("xlm", "XLMWithLMHeadModel does not pass each layer's output to the next layer"),
    ],
)
def test_an_unknown_shape_is_named(family: str, message: str, tmp_path: Path) -> None:
    result = try_family(family, tmp_path)
    assert result.code == 3 and message in result.reason
    assert not (tmp_path / "out").exists()
