"""Faults 14 to 18, 25 and 26: which files of a folder are opened, and that none of them runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks import INDEX, Victim, seeded
from safetensors.torch import load_file

Make = Callable[..., Victim]
SHARDED = {"max_shard_size": "30KB"}


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
    """Any two that hold more than one tensor: the index still names them when one is gone."""
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
