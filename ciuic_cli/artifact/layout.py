"""Layout of an artifact's safetensors files. It gives their exact sizes before anything is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHARD_BYTES = 5_000_000_000
"""Most tensor bytes per file (chosen); a larger tensor has a file to itself."""
_ALIGNMENT_ORDER = {"U8": 0, "I64": 1, "F64": 1, "F32": 2, "I32": 2, "BF16": 3, "F16": 3}
"""Order of the dtypes in a file: blobs first, then from large to small elements, so that every tensor is aligned."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an artifact. dtype: as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its name, its tensors in order, and its header with the length prefix."""

    file: str
    tensors: tuple[StoredTensor, ...]
    header: bytes

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def _header(tensors: Sequence[StoredTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def lay_out(tensors: Iterable[StoredTensor], shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Distribute an artifact's tensors over shards.

    Blobs (uint8, multiples of 16 bytes) come first, so that the tensors behind them stay aligned. The result does not
    depend on the order of `tensors`.
    """
    ordered = sorted(tensors, key=lambda t: (_ALIGNMENT_ORDER.get(t.dtype, 4), t.name))
    return place(ordered, shard_bytes)


def place(ordered: Iterable[StoredTensor], shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Distribute tensors in this order over shards, named as on the hub."""
    groups: list[list[StoredTensor]] = [[]]
    size = 0
    for tensor in ordered:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]), _header(groups[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group), _header(group))
        for number, group in enumerate(groups, 1)
    ]


def stored_bytes(shards: Iterable[Shard]) -> int:
    """Bytes of all safetensors files, headers included."""
    return sum(shard.nbytes for shard in shards)


def index_json(shards: Sequence[Shard]) -> str:
    """The `model.safetensors.index.json` of a sharded artifact."""
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
