"""Faults 22 to 24: values in tensors, their dtypes, and FP8 scales."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attacks import Victim, finite_predictions, seeded, tensor_names

from ciuic_cli.checkpoint.model_map import ModelMap

Make = Callable[..., Victim]
ALL = ("compress", "replace", "inspect")
RUNS = ("compress", "replace")


@seeded(2, campaign=12)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_fault_22_nan_or_inf_in_a_weight(victim: Make, seed: int, value: float) -> None:
    v = victim(seed, "llama" if seed % 2 else "deepseek_v3")
    name = v.random.choice(tensor_names(v))
    count = 0

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        nonlocal count
        flat = tensors[name].view(-1)
        places = v.random.sample(range(flat.numel()), v.random.randrange(1, min(9, flat.numel())))
        flat[places] = value
        count = len(places)

    v.edit_tensors(spoil)
    v.refused(f"{count} of ", "NaN or infinite", tensor=name, file="model.safetensors", commands=["compress"])


@seeded(2, campaign=4)
@pytest.mark.parametrize("value", [3e38, -1e38])
def test_fault_22_weights_that_drive_the_activations_to_infinity(
    victim: Make, seed: int, value: float
) -> None:
    v = victim(seed, "llama")
    name = v.random.choice([n for n in tensor_names(v) if "down_proj" in n or "o_proj" in n])
    v.edit_tensors(lambda tensors: tensors[name].fill_(value))
    v.refused("NaN or infin", file="model", commands=["compress"])


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_fault_22_weights_that_drive_the_statistics_to_infinity(victim: Make, name: str) -> None:
    v = victim(0, "llama")
    v.edit_tensors(lambda tensors: tensors[name].fill_(3e38))
    v.refused("NaN or infin", commands=["compress"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("nested", [False, True])
def test_fault_27_numbers_of_the_config_that_are_none(victim: Make, nested: bool, value: float) -> None:
    v = victim(0, "llama")
    v.edit_config(**({"rope_parameters": {"rope_theta": value}} if nested else {"rms_norm_eps": value}))
    name = "rope_theta" if nested else "rms_norm_eps"
    v.refused(f"config.json has {name}", "a finite number", file="config.json", remedy="download")


def test_fault_27_a_number_that_makes_the_activations_nan(victim: Make) -> None:
    v = victim(0, "llama")
    v.edit_config(rms_norm_eps=-5.0)
    v.refused("NaN or infin", file="model", commands=["compress"])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.norm.weight"),
        ("qwen2", "model.layers.0.self_attn.q_proj.bias"),
        ("deepseek_v3", "model.layers.1.post_attention_layernorm.weight"),
        ("llama", "lm_head.weight"),
        ("llama", "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_fault_22_finite_numbers_that_the_models_dtype_cannot_hold(
    victim: Make, family: str, name: str
) -> None:
    v = victim(0, family)
    v.edit_config(dtype="float16")
    v.edit_tensors(lambda tensors: tensors[name].view(-1)[-2:].fill_(1e5))
    done = v.refused(
        "2 of ", "in float16", file="model.safetensors", tensor=name, remedy="dtype", commands=["compress"]
    )
    assert "_proj.weight" in name or "forward: 100" not in done.stderr


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.layers.0.mlp.down_proj.weight"]
)
@pytest.mark.parametrize(("dtype", "value"), [(torch.float64, 1e300), (torch.float32, 3.4028e38)])
def test_fault_22_wider_numbers_than_the_model_has_name_file_and_tensor(
    victim: Make, name: str, dtype: torch.dtype, value: float
) -> None:
    v = victim(0, "llama")
    v.edit_tensors(
        lambda tensors: tensors.update(
            {name: torch.full_like(tensors[name], value, dtype=torch.float64).to(dtype)}
        )
    )
    v.refused("NaN or infinite in bfloat16", file="model.safetensors", tensor=name, commands=["compress"])


@pytest.mark.parametrize("value", [1e20, 1e36])
def test_fault_22_a_weight_whose_loss_cannot_be_predicted(victim: Make, value: float) -> None:
    v = victim(0, "llama")
    v.edit_tensors(lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"][-1, -1:].fill_(value))
    v.refused("NaN or infin", file="model", tensor=".weight", remedy="too large", commands=["compress"])


def test_a_model_that_predicts_worse_than_guessing_is_not_published(victim: Make) -> None:
    v = victim(0, "llama")
    v.edit_tensors(lambda tensors: tensors["lm_head.weight"][-8:, -1].fill_(1e5))
    v.refused("worse than one that guesses", code=4, remedy="ciuic eval", commands=["compress", "replace"])


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.bool, torch.uint16, torch.int32, torch.int64, torch.complex64]
)
@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "model.norm.weight"), ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias")],
)
def test_a_dense_tensor_that_holds_no_floats(
    victim: Make, family: str, name: str, dtype: torch.dtype
) -> None:
    v = victim(0, family)
    v.edit_tensors(lambda tensors: tensors.update({name: torch.ones(tensors[name].shape, dtype=dtype)}))
    v.refused("stored as", "without a scale", file="model.safetensors", tensor=name, remedy="original")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint64, torch.complex64])
def test_a_table_of_integers_that_holds_something_else(victim: Make, dtype: torch.dtype) -> None:
    v = victim(0, "deepseek_v4")
    name = "layers.0.ffn.gate.tid2eid"
    v.edit_tensors(lambda tensors: tensors.update({name: torch.ones(tensors[name].shape, dtype=dtype)}))
    v.refused("stored as", "int64", file="model.safetensors", tensor=name, remedy="original")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_a_table_of_narrower_integers_works(victim: Make, dtype: torch.dtype) -> None:
    v = victim(0, "deepseek_v4")
    name = "layers.0.ffn.gate.tid2eid"
    v.edit_tensors(lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    v.succeeds()
    finite_predictions(v.out)


def test_an_artifact_that_our_reader_refuses_is_never_published(
    victim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ModelMap.stored_dtype

    def wrong(model_map: ModelMap, name: str) -> torch.dtype:
        return torch.int32 if name == "model.norm.weight" else right(model_map, name)

    monkeypatch.setattr(ModelMap, "stored_dtype", wrong)
    v = victim(0, "llama")
    done = v.compress()
    assert done.code == 1 and "cannot be opened" in done.stderr and "I32" in done.stderr
    assert not v.out.exists() and not list(v.folder.glob(".out.partial"))


@seeded(1, campaign=9)
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_fault_23_a_zero_or_constant_weight(victim: Make, seed: int, value: float) -> None:
    v = victim(seed, "llama" if seed % 2 else "deepseek_v3")
    name = v.random.choice([n for n in tensor_names(v) if "proj" in n or "embed" in n or "lm_head" in n])
    v.edit_tensors(lambda tensors: tensors[name].fill_(value))
    v.succeeds()
    finite_predictions(v.out)


def test_fault_23_everything_is_zero(victim: Make) -> None:
    v = victim(0, "llama")
    v.edit_tensors(lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    v.succeeds()
    finite_predictions(v.out)


def to_fp8(v: Victim, spoil: Callable[[dict[str, torch.Tensor], str], object]) -> str:
    """Store every projection in FP8 with one scale per 128 x 128 block, then call `spoil(tensors, name)`.

    Returns `name`, a random projection.
    """
    chosen = ""

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        nonlocal chosen
        names = [n for n in tensors if n.endswith("_proj.weight")]
        for name in names:
            rows, cols = tensors[name].shape
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.full((-(-rows // 128), -(-cols // 128)), 0.5)
        chosen = v.random.choice(names)
        spoil(tensors, chosen)

    v.edit_tensors(convert)
    v.edit_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return chosen


@seeded(2, campaign=6)
def test_fault_24_fp8_with_its_scales_works(victim: Make, seed: int) -> None:
    v = victim(seed, "deepseek_v3")
    to_fp8(v, lambda tensors, name: None)
    v.succeeds()
    finite_predictions(v.out)


@seeded(2, campaign=8)
def test_fault_24_fp8_without_its_scale(victim: Make, seed: int) -> None:
    v = victim(seed, "deepseek_v3")
    name = to_fp8(v, lambda tensors, name: tensors.pop(f"{name}_scale_inv"))
    v.refused("without its scale", f"{name}_scale_inv", file="model.safetensors", tensor=name, remedy="bf16")


@seeded(2, campaign=8)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (3, 3), (7,), (1, 1, 2), (0,)])
def test_fault_24_a_scale_of_the_wrong_shape(victim: Make, seed: int, shape: tuple[int, ...]) -> None:
    v = victim(seed, "deepseek_v3")
    name = to_fp8(v, lambda tensors, name: tensors.update({f"{name}_scale_inv": torch.ones(shape)}))
    v.refused("scale has shape", file="model.safetensors", tensor=name, remedy="bf16")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_fault_24_a_scale_of_another_dtype(victim: Make, dtype: torch.dtype) -> None:
    v = victim(0, "deepseek_v3")

    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"].to(dtype)

    name = to_fp8(v, change)
    v.refused("scale has dtype", file="model.safetensors", tensor=f"{name}_scale_inv", remedy="bf16")


def test_fault_24_nan_in_a_scale_names_the_scale(victim: Make) -> None:
    v = victim(0, "deepseek_v3")
    name = to_fp8(v, lambda tensors, name: tensors[f"{name}_scale_inv"].fill_(math.nan))
    v.refused("NaN", file="model.safetensors", tensor=f"{name}_scale_inv", commands=["compress"])
