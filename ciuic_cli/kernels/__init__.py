"""CUDA kernels for compressed matrices, as plain functions that check their arguments.

    available(device) -> (bool, reason)
    matrix = DeviceMatrix.on_device(header, blob)     stack = DeviceStack.on_device(stack_header, blob)
    linear([matrix, ...], x) -> [y, ...]              experts(stack, x, ids) -> y
    embedding(matrix, tokens, dtype) -> rows          decode(matrix, row_begin, row_end, dtype) -> transformed rows
    encode(targets, bits) -> (codes, decoded)         prepare(device, searches): compiles what `encode` will need

`runtime.gpu` makes weights and stacks of a model from them. The sources are in `cuda/`; NVRTC compiles each kernel
for the GPU at first use, and the result is cached on disk.
"""

from ciuic_cli.kernels.availability import available
from ciuic_cli.kernels.encoder import encode, prepare
from ciuic_cli.kernels.matrix import DeviceMatrix, DeviceStack, uniform
from ciuic_cli.kernels.multiply import linear
from ciuic_cli.kernels.routed import experts
from ciuic_cli.kernels.rows import decode, embedding

__all__ = [
    "DeviceMatrix",
    "DeviceStack",
    "available",
    "decode",
    "embedding",
    "encode",
    "experts",
    "linear",
    "prepare",
    "uniform",
]
