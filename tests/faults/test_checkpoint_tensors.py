"""Faults 19 to 21 and 27 to 29: missing and unexpected tensors, sizes in the config, and hostile names."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import (
    INDEX,
    Victim,
    finite_predictions,
    harmless,
    invoke,
    read_shard,
    seeded,
    tensor_names,
    write_shard,
)
from safetensors.torch import load_file
from tiny_checkpoints import make_checkpoint

Make = Callable[..., Victim]
ALL = ("compress", "replace", "inspect")
RUNS = ("compress", "replace")


@seeded(2, campaign=10)
def test_fault_19_missing_tensors_are_counted_and_never_initialised(victim: Make, seed: int) -> None:
    v = victim(seed, "llama", **({"max_shard_size": "30KB"} if seed % 2 else {}))
    lost = set(v.random.sample(tensor_names(v), v.random.randrange(1, 8)))
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
    assert "lm_head.weight" not in tensor_names(v)
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


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    "value",
    ["float8_e4m3fn", "int8", "bool", "complex64", "1", "nn", "torch.bfloat16", "", 1, True, {}, ["float16"]],
)
def test_fault_27_a_dtype_that_no_model_has(victim: Make, key: str, value: object) -> None:
    v = victim(0, "llama")
    v.edit_config(dtype=None)
    v.edit_config(**{key: value})
    v.refused(f"{key} = {value!r}", file="config.json", remedy=f"set {key} to bfloat16")


@pytest.mark.parametrize("value", ["float64", "half", "float32", None])
def test_fault_27_every_other_dtype_is_loaded(victim: Make, value: str | None) -> None:
    v = victim(0, "llama")
    v.edit_config(dtype=value)
    v.succeeds()
    finite_predictions(v.out)


@pytest.mark.parametrize("size", [2, 4])
def test_fault_27_no_matrix_is_worth_compressing(tmp_path: Path, text: Path, size: int) -> None:
    v = Victim(tmp_path, text, random.Random(0))
    make_checkpoint(
        "llama_tied", v.model, hidden_size=size, intermediate_size=2 * size, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    for options in ((), ("--dry-run",)):
        v.refused("no matrix that is worth compressing", file="model", commands=["compress"], options=options)
    assert invoke("inspect", v.model).code == 0


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
    (key,) = values
    v = victim(0, family)
    v.edit_config(**values)
    v.refused({"num_local_experts": "num_experts"}.get(key, key), file="config.json", commands=ALL)


@pytest.mark.parametrize(
    ("heads", "message", "file"),
    [
        (0, "transformers cannot build LlamaForCausalLM: ", "model"),
        (3, "stored with shape (24, 48), but config.json makes it (36, 48)", "model.safetensors"),
    ],
)
def test_fault_27_a_number_of_heads_that_the_model_cannot_have(
    victim: Make, heads: int, message: str, file: str
) -> None:
    v = victim(0, "llama")
    v.edit_config(num_key_value_heads=heads)
    v.refused(message, file=file, commands=ALL)


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v2", "deepseek_v4", "gemma3",
        *(
            pytest.param(family, marks=pytest.mark.campaign)
            for family in ("llama", "qwen2", "deepseek_v3", "deepseek_v32")
        ),
    ],
)  # fmt: skip
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
    header, data = read_shard(v.shards[0])
    header[name] = {"dtype": "BF16", "shape": [3 + wrong], "data_offsets": [len(data), len(data) + 6]}
    write_shard(v.shards[0], header, data + bytes(6))
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
