"""The map from files to transformers' model. Streaming layer by layer equals a full load bit by bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import FAMILIES
from transformers import AutoModelForCausalLM

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import InputError

Make = Callable[..., Path]
Mapped = Callable[[Path], ModelMap]
STREAMED = ["llama", "qwen2", "deepseek_v2", "deepseek_v3"]


@torch.no_grad()
def stream(model_map: ModelMap, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Logits with one decoder layer in memory at a time."""
    model = model_map.skeleton(dtype=dtype)
    layers = {prefix: model.get_submodule(prefix[:-1]) for prefix in model_map.layer_prefixes}
    others = [(name, child) for name, child in model.model.named_children() if name != "layers"]
    for name, child in others:
        model_map.materialise(child, f"model.{name}.", dtype)
    model_map.materialise(model.lm_head, "lm_head.", dtype)
    resident = []
    for prefix, layer in layers.items():

        def load(module: torch.nn.Module, *_: object, prefix: str = prefix) -> None:
            model_map.materialise(module, prefix, dtype)
            resident.append(sum(not tensor.is_meta for tensor in model.model.layers.parameters()))

        layer.register_forward_pre_hook(load)
        layer.register_forward_hook(lambda module, *_: model_map.release(module))
    logits = model(ids, use_cache=False).logits
    assert all(parameter.is_meta for parameter in model.model.layers.parameters())
    assert max(resident) == max(len(list(layer.parameters())) for layer in layers.values())
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_materialised_model_equals_from_pretrained(
    family: str, tiny_checkpoint: Make, mapped: Mapped, tokens: torch.Tensor
) -> None:
    folder = tiny_checkpoint(family)
    model_map = mapped(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model = model_map.skeleton()
    model_map.materialise(model, "")
    expected, found = reference.state_dict(), model.state_dict()
    assert expected.keys() == found.keys() == model_map.parameters.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    buffers = dict(model.named_buffers())
    for name, value in reference.named_buffers():
        assert torch.equal(buffers[name], value) and buffers[name].dtype == value.dtype, name
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)
    assert not model_map.warnings and not model_map.mtp.layers
    assert len(model_map.layer_prefixes) == reference.config.num_hidden_layers


@pytest.mark.parametrize("family", STREAMED)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["stored", "float32"])
def test_layer_streaming_equals_from_pretrained(
    family: str, dtype: torch.dtype | None, tiny_checkpoint: Make, mapped: Mapped, tokens: torch.Tensor
) -> None:
    folder = tiny_checkpoint(family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    with torch.no_grad():
        expected = reference(tokens, use_cache=False).logits
    assert expected.std() > 0.5  # the comparison would mean little for constant logits
    assert torch.equal(stream(mapped(folder), tokens, dtype), expected)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_half_precision_keeps_what_transformers_keeps_in_float32(
    family: str, tiny_checkpoint: Make, mapped: Mapped
) -> None:
    folder = tiny_checkpoint(family)
    model_map = mapped(folder)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = model_map.skeleton(dtype=dtype)
        model_map.materialise(model, "", dtype)
        expected = {name: value.dtype for name, value in reference.state_dict().items()}
        assert {name: value.dtype for name, value in model.state_dict().items()} == expected
    kept = [name for name, kind in model_map.fixed_dtypes.items() if kind == torch.float32]
    assert sum("e_score_correction_bias" in name for name in kept) >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_embedding_and_expert_is_compressed(
    family: str, tiny_checkpoint: Make, mapped: Mapped
) -> None:
    model_map = mapped(tiny_checkpoint(family))
    model = model_map.meta_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            parameter = model_map.parameters[weight]
            router = name.endswith("mlp.shared_expert_gate") or "weights_proj" in name
            assert parameter.compress != (router or parameter.tied_to is not None), (weight, parameter)
            assert parameter.compress == (parameter.reason == "")
        if name.endswith("mlp.experts"):
            for part in ("gate_up_proj", "down_proj"):
                parameter = model_map.parameters[f"{name}.{part}"]
                assert parameter.compress and len(parameter.shape) == 3
                assert len(parameter.sources) == parameter.shape[0] * (2 if part == "gate_up_proj" else 1)
    for name, parameter in model_map.parameters.items():
        if re.search(r"norm\.weight$|bias$|mlp\.gate\.weight$", name):
            assert not parameter.compress and parameter.reason, name
    compressed = sum(p.numel for p in model_map.parameters.values() if p.compress)
    assert compressed > 0.93 * model_map.stored_numel
    weights = sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())
    assert model_map.stored_numel == weights


def test_roles_of_deepseek_v3(tiny_checkpoint: Make, mapped: Mapped) -> None:
    parameters = mapped(tiny_checkpoint("deepseek_v3")).parameters
    roles = {name: parameter.role for name, parameter in parameters.items()}
    layer = "model.layers.1."
    assert roles["model.embed_tokens.weight"] == "embedding" and roles["lm_head.weight"] == "head"
    assert [roles[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")] == [
        "gate",
        "up",
        "down",
    ]
    for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        assert roles[f"{layer}self_attn.{part}.weight"] == "mla"
    assert roles[f"{layer}self_attn.o_proj.weight"] == "o"
    assert roles[f"{layer}mlp.experts.gate_up_proj"] == "expert_gate_up"
    assert roles[f"{layer}mlp.experts.down_proj"] == "expert_down"
    assert roles[f"{layer}mlp.shared_experts.down_proj.weight"] == "shared_expert_down"
    assert roles[f"{layer}mlp.gate.weight"] == "router"
    bias = parameters[f"{layer}mlp.gate.e_score_correction_bias"]
    assert bias.buffer and not bias.compress and bias.sources == (bias.name,)


def test_names_on_disk_are_the_originals(tiny_checkpoint: Make, mapped: Mapped) -> None:
    """The fixtures must have the layout of released checkpoints, or the mapping is not tested."""
    v3 = mapped(tiny_checkpoint("deepseek_v3")).parameters["model.layers.1.mlp.experts.gate_up_proj"]
    assert v3.sources[0] == "model.layers.1.mlp.experts.0.gate_proj.weight"
    v4 = mapped(tiny_checkpoint("deepseek_v4")).parameters
    assert v4["model.layers.0.self_attn.q_a_proj.weight"].sources == ("layers.0.attn.wq_a.weight",)
    assert "layers.0.ffn.experts.3.w3.weight" in v4["model.layers.0.mlp.experts.gate_up_proj"].sources
    assert v4["lm_head.weight"].sources == ("head.weight",)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "deepseek_v4"])
def test_single_experts_and_rows(family: str, tiny_checkpoint: Make, mapped: Mapped) -> None:
    model_map = mapped(tiny_checkpoint(family))
    for name, parameter in model_map.parameters.items():
        if len(parameter.shape) == 3:
            whole = model_map.read(name)
            assert whole.shape == parameter.shape
            for expert in range(parameter.shape[0]):
                assert torch.equal(model_map.read_expert(name, expert), whole[expert])
            with pytest.raises(ValueError, match="no expert"):
                model_map.read_expert(name, parameter.shape[0])
    embedding = model_map.read("model.embed_tokens.weight")
    assert torch.equal(model_map.read_rows("model.embed_tokens.weight", 17, 200), embedding[17:200])


def test_experts_that_are_stored_fused(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make
) -> None:
    source = mapped(tiny_checkpoint("deepseek_v3"))

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in source.parameters.items():
            if len(parameter.shape) == 3:
                for expert in parameter.sources:
                    del tensors[expert]
                tensors[name] = source.read(name)

    fused = mapped(changed(source.checkpoint.folder, tmp_path / "fused", fuse))
    name = "model.layers.2.mlp.experts.gate_up_proj"
    assert fused.parameters[name].sources == (name,)
    assert torch.equal(fused.read(name), source.read(name))
    assert torch.equal(fused.read_expert(name, 4), source.read_expert(name, 4))


def test_fp8_checkpoint_streams_like_its_decoded_copy(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make, tokens: torch.Tensor
) -> None:
    """V3 in FP8 with partial blocks, compared with from_pretrained on the decoded bf16 weights."""
    block = 16

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight") or "with_mqa" in name]:
            weight = tensors[name].float()
            rows, cols = (-(-size // block) for size in weight.shape)
            scale = (
                torch.rand(rows, cols, generator=torch.Generator().manual_seed(rows * cols)) * 0.02 + 0.005
            )
            spread = scale.repeat_interleave(block, 0)[: weight.shape[0]].repeat_interleave(block, 1)
            tensors[name] = (weight / spread[:, : weight.shape[1]]).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale

    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    source = tiny_checkpoint("deepseek_v3")
    folder = changed(source, tmp_path / "fp8", quantize, quantization_config=section)
    model_map = mapped(folder)
    assert not model_map.warnings
    assert len(model_map.checkpoint.scales) == 3 * 5 + 3 + 2 * 3 + 2 * 6 * 3

    def decode(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name in model_map.checkpoint.scales:
                tensors[name] = model_map.checkpoint.read_decoded(name).to(torch.bfloat16)
                del tensors[f"{name}_scale_inv"]

    decoded = changed(folder, tmp_path / "bf16", decode)
    config = json.loads((decoded / "config.json").read_text())
    del config["quantization_config"]
    (decoded / "config.json").write_text(json.dumps(config))
    reference = AutoModelForCausalLM.from_pretrained(decoded, dtype="auto")
    assert model_map.dtype == torch.bfloat16
    with torch.no_grad():
        expected = reference(tokens, use_cache=False).logits
    assert torch.equal(stream(model_map, tokens), expected)


def test_v4_with_fp4_experts_and_fp8_attention(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make, tokens: torch.Tensor
) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(5)
        for name in [name for name in tensors if re.search(r"experts\.\d+\.w\d\.weight$", name)]:
            rows, cols = tensors[name].shape
            packed = torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
            tensors[name] = packed.view(torch.int8)
            scale = torch.randint(120, 124, (rows, cols // 32), generator=generator, dtype=torch.uint8)
            tensors[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
        for name in [name for name in tensors if re.search(r"attn\.w(q_a|q_b|kv|o_a|o_b)\.weight$", name)]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            scale = torch.full((1, 1), 126, dtype=torch.uint8)
            tensors[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)

    section = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    source = tiny_checkpoint("deepseek_v4")
    model_map = mapped(changed(source, tmp_path / "v4", quantize, quantization_config=section))
    assert not model_map.warnings
    name = "model.layers.1.mlp.experts.down_proj"
    assert model_map.read_expert(name, 2).shape == model_map.parameters[name].shape[1:] == (64, 32)
    attention = "model.layers.1.self_attn.q_a_proj.weight"
    original = mapped(source).read(attention).to(torch.float8_e4m3fn).float()
    assert torch.equal(model_map.read(attention), original * 0.5)
    logits = stream(model_map, tokens)
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_19_missing_tensors_are_counted_and_the_first_are_named(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make
) -> None:
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.1.self_attn" in name]:
            del tensors[name]

    folder = changed(tiny_checkpoint("llama"), tmp_path / "m", lose)
    with pytest.raises(InputError, match=r"4 tensor\(s\) .* missing: .*q_proj.*k_proj.*v_proj") as caught:
        mapped(folder)
    assert caught.value.tensor == "model.layers.1.self_attn.q_proj.weight" and caught.value.exit_code == 3


@pytest.mark.parametrize("which", ["gate_proj", "down_proj"])
def test_19_a_missing_expert_is_refused(
    tiny_checkpoint: Make, tmp_path: Path, which: str, mapped: Mapped, changed: Make
) -> None:
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"model.layers.1.mlp.experts.3.{which}.weight"]

    folder = changed(tiny_checkpoint("deepseek_v3"), tmp_path / "m", lose)
    with pytest.raises(InputError) as caught:
        mapped(folder)
    assert "layers.1.mlp.experts" in (caught.value.tensor or "")


def test_a_tensor_of_another_shape_than_the_config_says(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make
) -> None:
    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(47, dtype=torch.bfloat16)

    with pytest.raises(InputError, match=r"\(47,\).*\(48,\)") as caught:
        mapped(changed(tiny_checkpoint("llama"), tmp_path / "m", shrink))
    assert caught.value.tensor == "model.norm.weight"


def test_integer_weights_without_a_scale_are_refused(
    tiny_checkpoint: Make, tmp_path: Path, mapped: Mapped, changed: Make
) -> None:
    def integers(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = torch.ones(tensors[name].shape, dtype=torch.int8)

    with pytest.raises(InputError, match="I8 without a scale"):
        mapped(changed(tiny_checkpoint("llama"), tmp_path / "m", integers))


def test_sharded_checkpoints_read_the_same(tiny_checkpoint: Make, mapped: Mapped) -> None:
    whole, parts = mapped(tiny_checkpoint("llama")), mapped(tiny_checkpoint("llama", max_shard_size="30KB"))
    assert len(parts.checkpoint.files()) > 3
    for name in whole.parameters:
        assert torch.equal(whole.read(name), parts.read(name)), name


def test_unknown_parameters_and_modules_without_buffers_are_value_errors(
    tiny_checkpoint: Make, mapped: Mapped
) -> None:
    model_map = mapped(tiny_checkpoint("llama"))
    with pytest.raises(ValueError, match="no parameter"):
        model_map.read("model.none")
    with pytest.raises(ValueError, match="skeleton"):
        model_map.materialise(model_map.meta_model().model.rotary_emb, "model.rotary_emb.")
