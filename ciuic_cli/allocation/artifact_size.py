"""The tensors that an artifact stores, and their exact bytes, before anything is encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.arms import ArmTable
from ciuic_cli.artifact.layout import Shard, StoredTensor, lay_out
from ciuic_cli.checkpoint.formats import TORCH_DTYPES
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.sizes import packed_nbytes
from ciuic_cli.codecs.stack import stack_header_nbytes

_SAFETENSORS_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def shards_of(model_map: ModelMap, blob_bytes: Mapping[str, int]) -> list[Shard]:
    """The safetensors files of an artifact; blob_bytes: bytes of every compressed parameter."""
    blobs = [StoredTensor(name, "U8", (size,), size) for name, size in blob_bytes.items()]
    return lay_out(dense_tensors(model_map) + blobs)


def blob_sizes(
    model_map: ModelMap, tables: Sequence[ArmTable], row_bits: Mapping[str, NDArray[np.uint8]]
) -> dict[str, int]:
    """Bytes of every compressed parameter's blob, headers of stacks included; row_bits: by matrix key."""
    sizes_of: dict[str, list[int]] = {}
    for table in tables:
        matrix = table.matrix
        size = packed_nbytes(
            matrix.rows,
            matrix.cols,
            row_bits[matrix.key],
            table.lowrank_bytes,
            is_sorted=table.row_class is not None,
            has_input_scale=table.input_scale is not None,
        )
        sizes_of.setdefault(matrix.name, []).append(size)
    return {
        name: sum(sizes)
        + (stack_header_nbytes(len(sizes)) if len(model_map.parameters[name].shape) == 3 else 0)
        for name, sizes in sizes_of.items()
    }


def dense_names(model_map: ModelMap) -> list[str]:
    """Parameters that are stored uncompressed: norms, biases, routers."""
    return [p.name for p in model_map.parameters.values() if not p.compress and not p.tied_to]


def dense_tensors(model_map: ModelMap) -> list[StoredTensor]:
    """The uncompressed parameters, in the dtype of the checkpoint (`ModelMap.stored_dtype`)."""
    tensors = []
    for name in dense_names(model_map):
        dtype = model_map.stored_dtype(name)
        shape = model_map.parameters[name].shape
        nbytes = int(np.prod(shape)) * dtype.itemsize
        tensors.append(StoredTensor(name, _SAFETENSORS_NAMES[dtype], shape, nbytes))
    return tensors


def require_readable(model_map: ModelMap) -> None:
    """Read every uncompressed parameter once, before any work; raises InputError for one that cannot be stored."""
    for name in dense_names(model_map):
        model_map.read(name)
