"""The layout is valid for the safetensors library: headers, order, shards, and exact bytes before writing."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ciuic_cli.artifact.layout import SHARD_BYTES, StoredTensor, index_json, lay_out, stored_bytes
from ciuic_cli.checkpoint.header import read_header

_ITEM = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "F64": 8}


def _tensor(name: str, dtype: str, *shape: int) -> StoredTensor:
    return StoredTensor(name, dtype, shape, int(np.prod(shape)) * _ITEM[dtype])


def _payload(tensor: StoredTensor) -> bytes:
    return random.Random(tensor.name).randbytes(tensor.nbytes)


TENSORS = [
    _tensor("model.norm.weight", "BF16", 37),
    _tensor("model.layers.0.mlp.gate.e_score_correction_bias", "F32", 5),
    _tensor("model.embed_tokens.weight", "U8", 16 * 13),
    _tensor("model.layers.0.q.weight", "U8", 16 * 7),
    _tensor("table", "I64", 3, 2),
    _tensor('größe "quoted"\n', "F16", 4, 3),
    _tensor("scalar", "F32"),
    _tensor("nothing", "F32", 0, 4),
]


def _written(tmp_path: Path, shard_bytes: int) -> list[Path]:
    files = []
    for shard in lay_out(TENSORS, shard_bytes):
        path = tmp_path / shard.file
        path.write_bytes(shard.header + b"".join(_payload(tensor) for tensor in shard.tensors))
        assert path.stat().st_size == shard.nbytes
        files.append(path)
    return files


def test_the_safetensors_library_reads_what_was_laid_out(tmp_path: Path) -> None:
    (path,) = _written(tmp_path, SHARD_BYTES)
    assert path.name == "model.safetensors"
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(tensor.name for tensor in TENSORS)
        for tensor in TENSORS:
            part = file.get_slice(tensor.name)
            assert part.get_dtype() == tensor.dtype
            assert tuple(part.get_shape()) == tensor.shape
            value = file.get_tensor(tensor.name).reshape(-1)
            assert value.view(torch.uint8).numpy().tobytes() == _payload(tensor)
    ours = read_header(path)
    assert {name: entry.shape for name, entry in ours.tensors.items()} == {t.name: t.shape for t in TENSORS}


def test_blobs_come_first_and_everything_is_aligned() -> None:
    (shard,) = lay_out(TENSORS)
    assert len(shard.header) % 8 == 0
    assert int.from_bytes(shard.header[:8], "little") == len(shard.header) - 8
    entries = json.loads(shard.header[8:])
    for tensor in shard.tensors:
        begin, end = entries[tensor.name]["data_offsets"]
        assert end - begin == tensor.nbytes
        assert begin % _ITEM[tensor.dtype] == 0
        if tensor.dtype == "U8":
            assert begin % 16 == 0
    dtypes = [tensor.dtype for tensor in shard.tensors]
    assert dtypes[:2] == ["U8", "U8"]
    assert "U8" not in dtypes[2:]


def test_the_order_of_the_input_does_not_matter() -> None:
    shuffled = TENSORS.copy()
    random.Random(1).shuffle(shuffled)
    assert lay_out(shuffled) == lay_out(TENSORS)


@pytest.mark.parametrize("limit", [1, 100, 208, 320, 321, 400])
def test_shards_are_split_at_the_limit(tmp_path: Path, limit: int) -> None:
    shards = lay_out(TENSORS, limit)
    assert len(shards) > 1
    for number, shard in enumerate(shards, 1):
        assert shard.file == f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        data = sum(tensor.nbytes for tensor in shard.tensors)
        assert data <= limit or len(shard.tensors) == 1
    for before, after in itertools.pairwise(shards):  # no shard is split too early
        assert sum(t.nbytes for t in before.tensors) + after.tensors[0].nbytes > limit
    assert sorted(t.name for s in shards for t in s.tensors) == sorted(t.name for t in TENSORS)
    files = _written(tmp_path, limit)
    assert stored_bytes(shards) == sum(path.stat().st_size for path in files)
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert len(list(file.keys())) > 0


def test_the_index_names_every_tensors_file() -> None:
    shards = lay_out(TENSORS, 208)
    index = json.loads(index_json(shards))
    assert index["weight_map"] == {t.name: s.file for s in shards for t in s.tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS)


def test_a_model_without_tensors_is_still_a_file(tmp_path: Path) -> None:
    (shard,) = lay_out([])
    path = tmp_path / shard.file
    path.write_bytes(shard.header)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == []
