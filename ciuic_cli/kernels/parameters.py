"""The kernels' parameter blocks, as `cuda/parameters.h` declares them. A test compares sizes and offsets."""

from __future__ import annotations

import ctypes
from typing import Any

MAX_PARTS = 4
"""Most matrices of one launch of the product."""

STRIPE = 1024
"""Inputs that one warp transforms at a time."""

EXCHANGE_BYTES = 4 * (STRIPE + 32)
"""Bytes of shared memory that one warp needs for a transform."""

FLOAT, HALF, BFLOAT = 0, 1, 2
"""Codes of dtypes: float32, float16, bfloat16."""

TO_BYTES, TO_HALF, TO_BFLOAT, INVERSE = 0, 1, 2, 3
"""Modes of the transform: its result is int8 with residuals, float16 or bfloat16; or it is the inverse, to float32."""


def _fields(pointers: str = "", longs: str = "", words: str = "") -> list[tuple[str, Any]]:
    kinds = ((pointers, ctypes.c_void_p), (longs, ctypes.c_uint64), (words, ctypes.c_uint32))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Part(ctypes.Structure):
    """One matrix, or one stack of experts, of a launch whose matrices share their input."""

    _fields_ = _fields("blob group_offset y addend", "y_stride", "rows groups first_block y_type")


class Linear(ctypes.Structure):
    _fields_ = (
        ("part", Part * MAX_PARTS),
        *_fields(
            "x x_scale x_sum pair_expert pair_x pair_y",
            words="parts cols_padded pairs experts group_slot x_width",
        ),
    )


class Transform(ctypes.Structure):
    _fields_ = _fields(
        "x input_factor out out_scale out_sum",
        "x_stride out_stride",
        "cols cols_padded log2_block seed x_type mode",
    )


class Decode(ctypes.Structure):
    _fields_ = _fields("blob group_offset out", words="rows cols_padded row_begin row_end out_type reserved")


class Embedding(ctypes.Structure):
    _fields_ = _fields(
        "blob group_offset tokens input_factor out", words="rows cols cols_padded log2_block seed out_type"
    )


class LowRank(ctypes.Structure):
    _fields_ = _fields("blob group_offset z out", words="rank cols_padded")


class Encode(ctypes.Structure):
    _fields_ = _fields("targets codes decoded scratch", words="tiles")


MIRRORS: dict[str, type[ctypes.Structure]] = {
    "CiuicPart": Part,
    "CiuicLinear": Linear,
    "CiuicTransform": Transform,
    "CiuicDecode": Decode,
    "CiuicEmbedding": Embedding,
    "CiuicLowRank": LowRank,
    "CiuicEncode": Encode,
}
"""Structures by their name in C."""
