"""Faults 14 to 18, 25 and 26: which files of a folder are opened, and that no code in them runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks import INDEX, Outcome, Victim, harmless, invoke, read_shard, seeded, snapshot, write_shard
from safetensors.torch import load_file

Make = Callable[..., Victim]
SHARDED = {"max_shard_size": "30KB"}
TOKENIZER_DAMAGE: tuple[dict[str, object], ...] = (
    {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}],
                        "pair": [], "special_tokens": {}}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "absent"}},
)  # fmt: skip
"""Parts of a tokenizer.json that load and then fail in use: two panics of the tokenizers library and an exception."""


def damage_tokenizer(folder: Path, damage: dict[str, object]) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))


@seeded(2, campaign=6)
def test_fault_14_several_shards_and_no_index(victim: Make, seed: int) -> None:
    v = victim(seed, "llama", **SHARDED)
    (v.model / INDEX).unlink()
    for shard in v.shards:
        shard.rename(shard.with_name(f"{v.random.randbytes(4).hex()}.safetensors"))
    v.refused(f"{len(v.shards)} safetensors files", file="model", remedy=INDEX)


@seeded(2, campaign=6)
def test_fault_14_one_shard_of_several_and_no_index(victim: Make, seed: int) -> None:
    v = victim(seed, "llama", **SHARDED)
    kept = v.shard()
    for path in (v.model / INDEX, *v.shards):
        if path != kept:
            path.unlink()
    v.refused("only part", file=kept.name)


@seeded(2, campaign=4)
@pytest.mark.parametrize(
    "name",
    ["../{0}", "{1}/{0}", "sub/../../{0}", "..\\{0}", "./../{0}", "../model/../{0}", "{0}\0.safetensors"],
)
def test_fault_15_a_name_that_leads_outside_is_never_opened(victim: Make, seed: int, name: str) -> None:
    v = victim(seed, "llama", **SHARDED)
    shard = v.shard()
    outside = v.folder / f"outside-{shard.name}"
    shutil.move(shard, outside)
    (v.model / "sub").mkdir()
    evil = name.format(outside.name, v.folder)
    moved: list[str] = []

    def redirect(index: dict[str, str]) -> None:
        moved.extend(tensor for tensor, file in index.items() if file == shard.name)
        index.update(dict.fromkeys(moved, evil))

    v.edit_index(redirect)
    done = v.refused("outside", file=INDEX, remedy="never opened")
    assert done.field("tensor") in moved
    assert done.opened and not any(outside.name in path for path in done.opened)


@seeded(2, campaign=6)
@pytest.mark.parametrize("what", ["shard", "config.json", INDEX, "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("relative", [True, False])
def test_fault_16_a_symlink_that_leaves_the_folder(
    victim: Make, seed: int, what: str, relative: bool
) -> None:
    v = victim(seed, "llama", **SHARDED)
    link = v.shard() if what == "shard" else v.model / what
    outside = v.folder / f"outside-{link.name}"
    shutil.move(link, outside)
    link.symlink_to(Path("..") / outside.name if relative else outside)
    done = v.refused("symbolic link leads outside", file=link.name, remedy="never followed")
    assert not any("outside-" in path for path in done.opened)


@seeded(2, campaign=4)
def test_fault_16_links_in_a_circle(victim: Make, seed: int) -> None:
    v = victim(seed)
    shard = v.shard()
    shard.unlink()
    other = v.model / "other.safetensors"
    other.symlink_to(shard.name)
    shard.symlink_to(other.name)
    v.refused(file=".safetensors")


@seeded(2, campaign=4)
def test_fault_16_a_folder_reached_through_a_link(victim: Make, seed: int) -> None:
    v = victim(seed, "llama", **SHARDED)
    shard = v.shard()
    (v.folder / "elsewhere").mkdir()
    shutil.move(shard, v.folder / "elsewhere" / shard.name)
    (v.model / "sub").symlink_to("../elsewhere")
    v.edit_index(lambda index: index.update({k: f"sub/{f}" for k, f in index.items() if f == shard.name}))
    v.refused("symbolic link leads outside", file=shard.name)


@seeded(2, campaign=4)
def test_fault_16_the_hub_caches_own_links_work(victim: Make, seed: int) -> None:
    v = victim(seed, "llama", **SHARDED)
    repository = v.folder / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / v.random.randbytes(20).hex()
    snapshot.mkdir(parents=True)
    for file in list(v.model.iterdir()):
        blob = repository / "blobs" / v.random.randbytes(32).hex()
        shutil.move(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    v.model = snapshot
    done = v.compress()
    assert done.code == 0, done.stderr
    assert not any(path.is_symlink() for path in v.out.iterdir())


@seeded(2, campaign=6)
def test_fault_17_every_absent_shard_is_listed(victim: Make, seed: int) -> None:
    v = victim(seed, "deepseek_v3", max_shard_size="20KB")
    lost = v.random.sample(v.shards, v.random.randrange(1, len(v.shards)))
    for shard in lost:
        shard.unlink()
    v.refused(f"{len(lost)} shard(s)", *(shard.name for shard in lost), file=INDEX, remedy="download")


def two_shards(v: Victim) -> list[Path]:
    """Two random shards with more than one tensor each, so that the index still names both if a tensor is moved."""
    return v.random.sample([shard for shard in v.shards if len(load_file(shard)) > 1], 2)


@seeded(2, campaign=6)
@pytest.mark.parametrize("changed", [False, True])
def test_fault_18_one_tensor_in_two_shards(victim: Make, seed: int, changed: bool) -> None:
    v = victim(seed, "llama", **SHARDED)
    first, second = two_shards(v)
    name, tensor = v.random.choice(list(load_file(first).items()))
    v.edit_tensors(lambda tensors: tensors.update({name: tensor + int(changed)}), second)
    v.refused("in two shards", first.name, second.name, tensor=name, file=".safetensors")


@seeded(2, campaign=6)
def test_fault_18_the_index_places_a_tensor_elsewhere(victim: Make, seed: int) -> None:
    v = victim(seed, "llama", **SHARDED)
    first, second = two_shards(v)
    name = v.random.choice(list(load_file(first)))
    v.edit_index(lambda index: index.update({name: second.name}))
    v.refused(first.name, second.name, tensor=name, file=INDEX)


@seeded(2, campaign=4)
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.ckpt", "pytorch_model-00001-of-00002.bin"]
)
def test_fault_25_only_pickles(victim: Make, seed: int, name: str) -> None:
    v = victim(seed)
    for path in (*v.shards, v.model / INDEX):
        path.unlink(missing_ok=True)
    marker = v.folder / "ran"
    (v.model / name).write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(marker) + b"'\ntR.")
    v.refused("pickle", name, file="model", remedy="save_pretrained")
    assert not marker.exists()


@pytest.mark.parametrize("damage", TOKENIZER_DAMAGE, ids=str)
def test_a_tokenizer_that_fails_in_use_is_named(victim: Make, damage: dict[str, object]) -> None:
    v = victim(0, "llama")
    damage_tokenizer(v.model, damage)
    before = snapshot(v.folder)
    for done in (v.compress(), invoke("eval", v.model, "--text", v.text)):
        assert done.code == 3, done.stderr
        done.says("the tokenizer does not work")
        assert "tokenizer.json" in done.field("file") and "copy" in done.field("try")
        harmless(done)
    assert snapshot(v.folder) == before


def test_a_folder_without_a_tokenizer_is_named(victim: Make) -> None:
    v = victim(0, "llama")
    for file in v.model.glob("*token*"):
        file.unlink()
    v.refused("there are no files of a tokenizer", remedy="copy", commands=["compress"])


def test_a_tokenizer_of_another_model_is_named(victim: Make) -> None:
    v = victim(0, "llama", vocab_size=64)
    v.refused("the model has only 64", file="tokenizer.json", commands=["compress"])


@seeded(2, campaign=4)
@pytest.mark.parametrize("known", [True, False])
def test_fault_26_auto_map_is_never_executed(victim: Make, seed: int, known: bool) -> None:
    v = victim(seed, "llama")
    marker = v.folder / "ran"
    for file in ("configuration_evil.py", "modeling_evil.py", "tokenization_evil.py"):
        (v.model / file).write_text(f"open({str(marker)!r}, 'w')\nclass Evil:\n    pass\n")
    code = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    v.edit_config(auto_map=code)
    tokenizer = v.model / "tokenizer_config.json"
    tokenizer.write_text(
        tokenizer.read_text()[:-2] + ', "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", null]}}'
    )
    if known:
        _, report = v.succeeds()
        assert report["artifact_bytes"] > 0
        assert not list(v.out.glob("*.py")) and "evil" not in (v.out / "config.json").read_text()
    else:
        v.edit_config(model_type=f"evil{seed}", architectures=["Evil"])
        v.refused(f"evil{seed}", "never executed", file="config.json")
    assert not marker.exists()


def measured(v: Victim, model: Path) -> Outcome:
    """`ciuic eval` of the checkpoint itself."""
    done = invoke("eval", model, "--text", v.text, "--seqlen", 64, "--limit", 2, "--json")
    harmless(done)
    return done


@pytest.mark.parametrize("kind", ["no metadata", "null metadata", "stale file", "other name", "hostile name"])
def test_a_checkpoint_is_measured_as_it_is_compressed(victim: Make, kind: str) -> None:
    v = victim(0, "llama", **({} if kind in ("other name", "hostile name") else SHARDED))
    expected = json.loads(measured(v, v.model).stdout)["perplexity"]
    index = v.model / INDEX
    if "metadata" in kind:
        content = json.loads(index.read_text())
        index.write_text(
            json.dumps({"weight_map": content["weight_map"]} | ({"metadata": None} if "null" in kind else {}))
        )
    elif kind == "stale file":
        (v.model / "model.safetensors").write_bytes(b"left by another download")
    elif kind == "other name":
        v.shards[0].rename(v.model / "odd.safetensors")
    else:
        header, data = read_shard(v.shards[0])
        header["\x1b[31mx\x9b.\u202eweight"] = {
            "dtype": "BF16",
            "shape": [3],
            "data_offsets": [len(data), len(data) + 6],
        }
        write_shard(v.shards[0], header, data + bytes(6))
    done = measured(v, v.model)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["perplexity"] == expected


@pytest.mark.parametrize("content", ["null", "[1]", "5", "[" * 6000])
def test_a_damaged_generation_config_is_named(victim: Make, content: str) -> None:
    v = victim(0, "llama")
    (v.model / "generation_config.json").write_text(content)
    v.refused(file="generation_config.json", commands=["compress"])
    assert measured(v, v.model).code == 3


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "generation_config.json", "LICENSE"]
)
def test_files_that_are_read_whole_have_a_limit(victim: Make, name: str) -> None:
    v = victim(0, "llama")
    with (v.model / name).open("ab") as file:
        file.truncate(300 << 20)
    v.refused("at most", file=name)


def test_fault_16_a_folder_of_templates_that_leads_outside(victim: Make) -> None:
    v = victim(0, "llama")
    outside = v.folder / "outside"
    outside.mkdir()
    (outside / "tool.jinja").write_text("x")
    (v.model / "additional_chat_templates").symlink_to(outside)
    v.refused("leads outside", file="additional_chat_templates")


def test_a_path_that_no_folder_can_have(victim: Make) -> None:
    v = victim(0, "llama")
    v.model = v.folder / ("x" * 300)
    v.refused("no such folder")


def test_a_beginning_as_long_as_the_sequences(victim: Make) -> None:
    v = victim(0, "llama")
    single = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}] * 64 + [
        {"Sequence": {"id": "A", "type_id": 0}}
    ]
    tokens = {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}}
    damage_tokenizer(
        v.model,
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": single,
                "pair": single,
                "special_tokens": tokens,
            }
        },
    )
    v.refused("sequences of 64 tokens", "--seqlen", code=2, file="tokenizer.json", commands=["compress"])


@pytest.mark.parametrize(
    "values", [{"n_group": None}, {"topk_group": None}, {"num_experts_per_tok": None}, {"head_dim": 4}]
)
def test_fault_27_a_choice_that_the_layers_cannot_run_with(victim: Make, values: dict[str, object]) -> None:
    v = victim(0, "deepseek_v3")
    v.edit_config(**values)
    v.refused("transformers cannot run the model", file="model", remedy="config.json", commands=["compress"])
    assert measured(v, v.model).code == 3
