"""Faults 19 to 24 and 27 to 29: what the tensors, the config and the names say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import INDEX, Victim, harmless, invoke, put_together, seeded, take_apart
from safetensors.torch import load_file

import ciuic_cli
from ciuic_cli.checkpoint.model_map import ModelMap

Make = Callable[..., Victim]
ALL = ("compress", "replace", "inspect")
RUNS = ("compress", "replace")


def names_of(v: Victim) -> list[str]:
    return [name for shard in v.shards for name in load_file(shard)]


def finite_predictions(folder: Path) -> None:
    model = ciuic_cli.load(folder)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(3, 40)[None]).logits).all()


@seeded(2, campaign=10)
def test_fault_19_missing_tensors_are_counted_and_never_initialised(victim: Make, seed: int) -> None:
    v = victim(seed, "llama", **({"max_shard_size": "30KB"} if seed % 2 else {}))
    lost = set(v.random.sample(names_of(v), v.random.randrange(1, 8)))
    for shard in v.shards:
        v.edit_tensors(lambda tensors: [tensors.pop(name, None) for name in lost], shard)
    if (v.model / INDEX).exists():
        v.edit_index(lambda index: [index.pop(name) for name in lost])
    done = v.refused(f"{len(lost)} tensor(s) of the model are missing", remedy="never initialised")
    assert done.field("tensor") in lost
    assert sum(name in done.stderr.splitlines()[0] for name in lost) >= min(3, len(lost))


@seeded(2, campaign=4)
def test_fault_19_the_index_names_tensors_that_no_shard_has(victim: Make, seed: int) -> None:
    v = victim(seed, "llama", max_shard_size="30KB")
    shard = v.shard()
    lost = v.random.choice(list(load_file(shard)))
    v.edit_tensors(lambda tensors: tensors.pop(lost), shard)
    v.refused("no shard has", lost, file=INDEX, tensor=lost)


@seeded(2, campaign=4)
def test_fault_19_an_expert_under_another_number_is_missing(victim: Make, seed: int) -> None:
    v = victim(seed, "deepseek_v3")
    part = v.random.choice(["gate", "up", "down"])
    number = v.random.randrange(6)
    name = "model.layers.1.mlp.experts.{}.{}_proj.weight"

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name.format(9, part)] = tensors.pop(name.format(number, part))

    v.edit_tensors(rename)
    v.refused(f"expert {number} is missing", f"{part}_proj", file="model")


@seeded(2, campaign=4)
def test_fault_20_unexpected_tensors_are_a_warning(victim: Make, seed: int) -> None:
    v = victim(seed, "llama")
    extra = [f"model.layers.0.side{v.random.randrange(99)}.weight", "unheard.of"]
    v.edit_tensors(lambda tensors: tensors.update({name: torch.ones(3) for name in extra}))
    inspected = invoke("inspect", v.model)
    assert inspected.code == 0
    inspected.says("2 tensor(s)", *extra)
    done, report = v.succeeds()
    done.says("2 tensor(s)", *extra)
    assert any(extra[0] in warning for warning in report["warnings"])


@seeded(2, campaign=4)
def test_fault_20_a_multi_token_prediction_layer_is_said_to_be_dropped(victim: Make, seed: int) -> None:
    v = victim(seed, "deepseek_v3")
    v.edit_config(num_nextn_predict_layers=1)

    def add_layer(tensors: dict[str, torch.Tensor]) -> None:
        last = {n: t for n, t in tensors.items() if n.startswith("model.layers.2.")}
        tensors.update({n.replace("layers.2.", "layers.3."): t.clone() for n, t in last.items()})
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(56, 112, dtype=torch.bfloat16)

    v.edit_tensors(add_layer)
    done, report = v.succeeds()
    done.says("multi-token-prediction layer model.layers.3", "dropped")
    assert report["dropped"]


@seeded(2, campaign=4)
def test_fault_21_an_absent_tied_head_is_counted_once(victim: Make, seed: int) -> None:
    v = victim(seed, "qwen2")
    assert "lm_head.weight" not in names_of(v)
    _, report = v.succeeds()
    assert report["parameters"] == sum(t.numel() for s in v.shards for t in load_file(s).values())
    finite_predictions(v.out)


@seeded(2, campaign=4)
def test_fault_21_a_tied_head_with_other_values_is_kept_with_a_warning(victim: Make, seed: int) -> None:
    v = victim(seed, "llama_tied")

    def untie(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[v.random.randrange(len(head)), v.random.randrange(48)] += 1
        tensors["lm_head.weight"] = head

    before = sum(t.numel() for t in load_file(v.shards[0]).values())
    v.edit_tensors(untie)
    done, report = v.succeeds()
    done.says("lm_head.weight", "differ", "both are kept")
    assert report["parameters"] == before + 263 * 48
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(load_file(v.out / "model.safetensors"))


@seeded(2, campaign=12)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_fault_22_nan_or_inf_in_a_weight(victim: Make, seed: int, value: float) -> None:
    v = victim(seed, "llama" if seed % 2 else "deepseek_v3")
    name = v.random.choice(names_of(v))
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
    name = v.random.choice([n for n in names_of(v) if "down_proj" in n or "o_proj" in n])
    v.edit_tensors(lambda tensors: tensors[name].fill_(value))
    v.refused("NaN or infin", file="model", commands=["compress"])


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_fault_22_weights_that_drive_the_statistics_to_infinity(victim: Make, name: str) -> None:
    v = victim(0, "llama")
    v.edit_tensors(lambda tensors: tensors[name].fill_(3e38))
    v.refused("NaN or infin", tensor="", commands=["compress"])


@pytest.mark.parametrize(
    "values",
    [{"rms_norm_eps": math.nan}, {"rms_norm_eps": -5.0}, {"rope_parameters": {"rope_theta": math.nan}}],
)
def test_fault_27_numbers_that_make_the_activations_nan(victim: Make, values: dict[str, Any]) -> None:
    v = victim(0, "llama")
    v.edit_config(**values)
    v.refused(commands=["compress"])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.norm.weight"),
        ("qwen2", "model.layers.0.self_attn.q_proj.bias"),
        ("deepseek_v3", "model.layers.1.mlp.gate.weight"),
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
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float64, 1e300), (torch.float32, 3.4028e38), (torch.float8_e8m0fnu, math.nan)]
)
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
    v.refused("NaN or infin", tensor=".weight", remedy="too large", commands=["compress"])


def test_a_model_that_predicts_worse_than_guessing_is_not_published(victim: Make) -> None:
    v = victim(0, "llama")
    v.edit_tensors(lambda tensors: tensors["lm_head.weight"][-1, -1:].fill_(1e5))
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


@seeded(2, campaign=8)
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_fault_23_a_zero_or_constant_weight(victim: Make, seed: int, value: float) -> None:
    v = victim(seed, "llama" if seed % 2 else "deepseek_v3")
    name = v.random.choice([n for n in names_of(v) if "proj" in n or "embed" in n or "lm_head" in n])
    v.edit_tensors(lambda tensors: tensors[name].fill_(value))
    v.succeeds()
    finite_predictions(v.out)


def test_fault_23_everything_is_zero(victim: Make) -> None:
    v = victim(0, "llama")
    v.edit_tensors(lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    v.succeeds()
    finite_predictions(v.out)


def to_fp8(v: Victim, spoil: Callable[[dict[str, torch.Tensor], str], object]) -> str:
    """Store every projection in FP8 with one scale per 128 x 128; `spoil` gets the tensors and one name."""
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


@seeded(2, campaign=4)
def test_fault_27_unknown_architecture(victim: Make, seed: int) -> None:
    v = victim(seed)
    v.edit_config(model_type=f"perceptron{seed}", architectures=["Perceptron"])
    v.refused("unknown architecture", f"perceptron{seed}", file="config.json")


@pytest.mark.parametrize("model_type", [None, 3, [], "vit", "t5", "", "llama\x1b[2J"])
def test_fault_27_no_language_model(victim: Make, model_type: object) -> None:
    v = victim(0, "llama")
    v.edit_config(model_type=model_type)
    v.refused(file="config.json")


def test_fault_27_another_architecture_than_the_weights(victim: Make) -> None:
    v = victim(0, "llama")
    v.edit_config(model_type="bert")
    v.refused("are missing", file="model")


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {"hidden_size": -48}),
        ("llama", {"hidden_size": 10**12}),
        ("llama", {"vocab_size": 2**62}),
        ("llama", {"vocab_size": 0}),
        ("llama", {"num_hidden_layers": -1}),
        ("llama", {"num_hidden_layers": 10**9}),
        ("llama", {"num_hidden_layers": 4000}),
        ("llama", {"num_attention_heads": 0}),
        ("llama", {"num_attention_heads": "4"}),
        ("llama", {"hidden_size": [48]}),
        ("llama", {"hidden_size": None}),
        ("llama", {"intermediate_size": -88}),
        ("llama", {"intermediate_size": 2**40}),
        ("llama", {"head_dim": -12}),
        ("llama", {"head_dim": 10**15}),
        ("llama", {"num_key_value_heads": 0}),
        ("llama", {"num_key_value_heads": 3}),
        ("llama", {"vocab_size": 1e300}),
        ("llama", {"vocab_size": 263.5}),
        ("llama", {"num_labels": 10**10}),
        ("llama", {"max_position_embeddings": -5}),
        ("llama", {"rms_norm_eps": "x"}),
        ("deepseek_v3", {"n_routed_experts": 10**9}),
        ("deepseek_v3", {"n_routed_experts": 60_000}),
        ("deepseek_v3", {"n_routed_experts": -6}),
        ("deepseek_v3", {"num_experts_per_tok": 10**7}),
        ("deepseek_v3", {"num_experts_per_tok": 7}),
        ("deepseek_v3", {"kv_lora_rank": -24}),
        ("deepseek_v3", {"q_lora_rank": 2**50}),
        ("deepseek_v3", {"qk_rope_head_dim": 10**12}),
        ("deepseek_v3", {"first_k_dense_replace": -1}),
        ("deepseek_v3", {"n_group": 0}),
        ("deepseek_v3", {"n_group": 5}),
        ("qwen2_moe", {"num_experts": 50_000}),
        ("qwen2_moe", {"num_experts": 10**9}),
        ("mixtral", {"num_local_experts": 60_000}),
    ],
)
def test_fault_27_absurd_or_negative_sizes(victim: Make, family: str, values: dict[str, Any]) -> None:
    v = victim(0, family)
    v.edit_config(**values)
    v.refused(commands=ALL)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma3"]
)
def test_fault_28_dimensions_that_no_block_divides(victim: Make, family: str) -> None:
    v = victim(0, family)
    done, report = v.succeeds()
    padded = report["padding"]
    assert padded["matrices"] > 0 and padded["weights"] > 0
    done_words = done.stdout
    assert "padding" in done_words
    assert (v.out / "model.safetensors").stat().st_size == report["artifact_bytes"] <= report["budget_bytes"]
    described = json.loads(invoke("inspect", v.out, "--tensors", "--json").stdout)
    shapes = {row["name"]: tuple(row["shape"]) for row in described["rows"]}
    assert any(size % 16 for shape in shapes.values() if len(shape) > 1 for size in shape)
    assert shapes == {
        row["name"]: tuple(row["shape"]) for row in report["components"] if row["name"] in shapes
    }
    finite_predictions(v.out)


HOSTILE = [
    f"model.layers.{'9' * 5000}.weight",
    "model.\x1b[2J\x1b]0;owned\x07.weight",
    "[bold red]model[/bold red].[link=file:///etc/passwd]x[/link]",
    "a\u202eb\u2066c\u200b.weight",
    "line\r\nbreak\x00\x08\x7f\x9b31m",
    "<script>alert(1)</script>",
    "x" * (1 << 20),
    "\x1b[31m" * 200_000,
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("wrong", [False, True])
def test_fault_29_hostile_tensor_names_are_printed_harmless(victim: Make, name: str, wrong: bool) -> None:
    v = victim(0, "llama")
    header, data = take_apart(v.shards[0])
    header[name] = {"dtype": "BF16", "shape": [3 + wrong], "data_offsets": [len(data), len(data) + 6]}
    put_together(v.shards[0], header, data + bytes(6))
    if wrong:
        done = v.refused("its span has", file="model.safetensors")
        assert len(done.stderr) < 20_000
        return
    done, _ = v.succeeds()
    for shown in (done, invoke("inspect", v.model, "--tensors")):
        harmless(shown)
        assert shown.code == 0 and "1 tensor(s)" in shown.stderr
        assert "\u202e" not in shown.stderr and len(shown.stderr) < 20_000
    page = (v.out / "memory_report.html").read_text(encoding="utf-8")
    assert "<script>" not in page and "\x1b" not in page


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_fault_29_hostile_words_in_the_config(victim: Make, name: str) -> None:
    v = victim(0, "llama")
    v.edit_config(architectures=[name], torch_dtype=name, **{name: name})
    for done in (invoke("inspect", v.model), v.compress()):
        harmless(done)
        assert done.code in (0, 3), done.stderr
        assert len(done.stderr) + len(done.stdout) < 30_000
