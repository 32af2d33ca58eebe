"""Loading artifacts through transformers: every model family, saving, and the errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_weights import as_tensor, random_codes, relative_error
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoints import FAMILIES
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from ciuic_cli import load
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.report.inspection import describe
from ciuic_cli.runtime.experts import CompressedExperts
from ciuic_cli.runtime.modules import CompressedEmbedding, CompressedLinear
from ciuic_cli.runtime.routing import MASKED_SCORE


def resident_bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_decoded_model(
    family: str, artifact: Callable[..., Any], prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the dense model with the decoded weights, in float32."""
    built = artifact(family, rank=5)
    dense = built.dense_model()
    expected = dense(prompt).logits
    model = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    assert relative_error(model(prompt).logits, expected) < 5e-5  # only the order of sums differs


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_stays_compressed(family: str, artifact: Callable[..., Any]) -> None:
    built = artifact(family, rank=5)
    model = AutoModelForCausalLM.from_pretrained(built.folder)
    names = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.uint8}
    assert names == {name for name, tensor in built.stored.items() if tensor.dtype == torch.uint8}
    assert names == set(built.decoded)
    left = [m.weight.numel() for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    assert all(numel < 150 for numel in left)  # matrices of a few rows, which would grow if compressed
    assert isinstance(model.get_input_embeddings(), CompressedEmbedding)
    assert isinstance(model.get_output_embeddings(), CompressedLinear)
    if family != "deepseek_v4":  # transformers keeps its norms and hyper-connections in float32
        assert resident_bytes(model) <= 1.02 * built.stored_bytes


@torch.inference_mode()
def test_bfloat16_activations(artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    built = artifact("llama")
    model = AutoModelForCausalLM.from_pretrained(built.folder)
    assert model.dtype == torch.bfloat16 and model.model.embed_tokens(prompt).dtype == torch.bfloat16
    exact = built.dense_model(torch.float64)(prompt).logits
    ours = relative_error(model(prompt).logits, exact)
    rounded = relative_error(built.dense_model(torch.bfloat16)(prompt).logits, exact)
    assert ours < 1.5 * rounded


@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3", "deepseek_v4"])
def test_generate_with_the_cache(family: str, artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    built = artifact(family)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    model = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    tokens = model.generate(prompt, **options)
    assert tokens.shape == (2, 26)
    assert torch.equal(tokens, built.dense_model().generate(prompt, **options))
    if family != "deepseek_v4":  # its context compression depends on the cache
        assert torch.equal(tokens, model.generate(prompt, use_cache=False, **options))


@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3", "deepseek_v4"])
def test_save_pretrained_round_trip(family: str, artifact: Callable[..., Any], tmp_path: Path) -> None:
    built = artifact(family, checksums="ciuic_checksums.json")
    model = AutoModelForCausalLM.from_pretrained(built.folder)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == set(built.stored)
    for name, tensor in built.stored.items():
        kept = saved[name].to(tensor.dtype) == tensor
        if name.endswith("e_score_correction_bias"):
            kept[1] = saved[name][1] == MASKED_SCORE  # the pruned expert, masked at load
        assert kept.all(), name
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "ciuic" and config["bits_per_weight"] == 4.0
    assert "checksums" not in config  # they describe the files of the original folder
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_saved_in_shards(artifact: Callable[..., Any], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact("llama").folder)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_tied_head_shares_the_blob(artifact: Callable[..., Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact("llama_tied").folder)
    assert model.lm_head.blob is model.model.embed_tokens.blob


@torch.inference_mode()
def test_model_without_a_head(artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    built = artifact("llama")
    base = AutoModel.from_pretrained(built.folder, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    assert torch.equal(base(prompt).last_hidden_state, whole.model(prompt).last_hidden_state)


@torch.inference_mode()
def test_device_map(artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    folder = artifact("deepseek_v3").folder
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model(prompt).logits, plain(prompt).logits)


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_offloaded_to_disk(
    family: str, artifact: Callable[..., Any], prompt: torch.Tensor, tmp_path: Path
) -> None:
    """Pruned experts stay masked in a model that is larger than its devices."""
    folder = artifact(family).folder
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = [name for name, _ in plain.named_children() if name != "model"]
    parts += [f"model.{name}" for name, _ in plain.model.named_children() if name != "layers"]
    layers = {f"model.layers.{n}": "disk" if n else "cpu" for n in range(len(plain.model.layers))}
    offloaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=dict.fromkeys(parts, "cpu") | layers, offload_folder=tmp_path
    )
    assert all(parameter.is_meta for parameter in offloaded.model.layers[1].parameters())
    assert torch.equal(offloaded(prompt).logits, plain(prompt).logits)


def test_gradients_reach_the_embeddings_output(artifact: Callable[..., Any], prompt: torch.Tensor) -> None:
    built = artifact("deepseek_v3", rank=5)
    model = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    dense = built.dense_model()
    gradients = []
    for candidate in (model, dense):
        rows = dense.get_input_embeddings()(prompt).detach().requires_grad_()
        candidate(inputs_embeds=rows).logits.square().mean().backward()
        gradients.append(rows.grad)
    assert relative_error(gradients[0], gradients[1]) < 1e-3


def edited(folder: Path, copy: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of an artifact with tensors replaced, or left out where None."""
    shutil.copytree(folder, copy)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors |= {name: value for name, value in changes.items() if value is not None}
    save_file({k: v for k, v in tensors.items() if changes.get(k, v) is not None}, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.norm.weight", "missing"), ("model.layers.1.mlp.experts.down_proj", "missing")],
)
def test_missing_tensors_raise(name: str, message: str, artifact: Callable[..., Any], tmp_path: Path) -> None:
    folder = edited(artifact("deepseek_v3").folder, tmp_path / "copy", **{name: None})
    with pytest.raises(InputError, match=f"{message}.*{name}"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_blob_of_another_shape(artifact: Callable[..., Any], tmp_path: Path) -> None:
    built = artifact("llama")
    prefix = "model.layers.0.mlp"
    folder = edited(
        built.folder,
        tmp_path / "copy",
        **{f"{prefix}.up_proj.weight": built.stored[f"{prefix}.down_proj.weight"]},
    )
    with pytest.raises(InputError, match=r"shape \[48, 88\].*expects \[88, 48\]") as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert caught.value.tensor == f"{prefix}.up_proj.weight"


@pytest.mark.parametrize(("offset", "value"), [(4, 17), (8, 0), (24, 200), (32, 9)])
def test_impossible_headers_are_refused_before_loading(
    offset: int, value: int, artifact: Callable[..., Any], tmp_path: Path
) -> None:
    """L, rows, rank and bits per weight of one blob."""
    name = "model.layers.2.self_attn.q_proj.weight"
    built = artifact("llama")
    damaged = built.stored[name].clone()
    damaged[offset] = value
    folder = edited(built.folder, tmp_path / "copy", **{name: damaged})
    with pytest.raises(InputError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert caught.value.tensor == name and str(folder) in str(caught.value.file)


@pytest.mark.parametrize("form", ["a coded router", "one dense stack"])
def test_loading_and_inspect_refuse_the_same_tensors(
    form: str, artifact: Callable[..., Any], tmp_path: Path
) -> None:
    built = artifact("deepseek_v3")
    block = "model.layers.1.mlp"
    if form == "a coded router":
        name = f"{block}.gate.weight"
        value = as_tensor(random_codes(*built.stored[name].shape))
    else:
        name = f"{block}.experts.gate_up_proj"
        value = built.decoded[name].to(torch.bfloat16)
    folder = edited(built.folder, tmp_path / "copy", **{name: value})
    for opened in (describe, load):
        with pytest.raises(InputError, match="cannot hold a compressed weight") as caught:
            opened(folder)
        assert str(caught.value.file) == str(folder) and name.startswith(str(caught.value.tensor))


def test_newer_format(artifact: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"version 4.*update ciuic"):
        AutoModelForCausalLM.from_pretrained(artifact("llama", format_version=4).folder)


@torch.inference_mode()
def test_indexer_whose_input_is_cast_to_its_weights_dtype(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    prompt: torch.Tensor,
    make_artifact: Callable[..., Any],
) -> None:
    """DeepSeek V3.2 casts the input to `weights_proj.weight.dtype`, which must not be uint8."""
    built = make_artifact(tiny_checkpoint("deepseek_v32", index_n_heads=16), tmp_path)
    name = "model.layers.1.self_attn.indexer.weights_proj"
    assert f"{name}.weight" in built.decoded
    model = AutoModelForCausalLM.from_pretrained(built.folder)
    projection = model.get_submodule(name)
    assert isinstance(projection, CompressedLinear)
    assert projection.weight.dtype == torch.float32 and projection.weight.shape == (16, 56)
    assert model.state_dict()[f"{name}.weight"].dtype == torch.uint8
    model = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    outputs = [m(prompt[:, :8]).logits for m in (model, built.dense_model())]  # 8 tokens: all are selected
    assert relative_error(*outputs) < 1e-3


def test_config_object_instead_of_a_file(artifact: Callable[..., Any]) -> None:
    built = artifact("llama")
    config = AutoModelForCausalLM.from_pretrained(built.folder).config
    model = AutoModelForCausalLM.from_pretrained(built.folder, config=config)
    assert isinstance(model.lm_head, CompressedLinear)


def test_state_dict_instead_of_files(artifact: Callable[..., Any]) -> None:
    built = artifact("llama")
    model = AutoModelForCausalLM.from_pretrained(built.folder)
    with pytest.raises(UsageError, match="from its files"):
        type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())


def test_pruned_experts_add_nothing(artifact: Callable[..., Any]) -> None:
    built = artifact("deepseek_v3", rank=5)
    model = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    experts = next(module for module in model.modules() if isinstance(module, CompressedExperts))
    x = torch.randn(3, 56)
    pruned = torch.full((3, 2), 1)
    assert not experts(x, pruned, torch.ones(3, 2)).any()
    assert experts(x, pruned + 1, torch.ones(3, 2)).any()
