"""CUDA kernels for compressed matrices, as plain functions that check what they are given.

    available(device) -> (bool, reason)
    matrix = DeviceMatrix(packed, blob)      stack = DeviceStack(packed_stack, blob)
    linear([matrix, ...], x) -> [y, ...]     experts(stack, x, ids) -> y
    embedding(matrix, tokens, dtype) -> rows decode(matrix, row_begin, row_end, dtype) -> transformed rows
    encode(targets, bits) -> (codes, decoded)
    KernelMatrix(packed, blob): what the runtime's products ask of a matrix

The sources are in `cuda/`, compiled at first use for the GPU at hand and cached.
"""

from ciuic_cli.kernels.availability import available
from ciuic_cli.kernels.encoder import encode
from ciuic_cli.kernels.matrix import DeviceMatrix, DeviceStack
from ciuic_cli.kernels.multiply import linear
from ciuic_cli.kernels.routed import experts
from ciuic_cli.kernels.rows import decode, embedding
from ciuic_cli.kernels.runtime_matrix import KernelMatrix

__all__ = [
    "DeviceMatrix",
    "DeviceStack",
    "KernelMatrix",
    "available",
    "decode",
    "embedding",
    "encode",
    "experts",
    "linear",
]
