"""Sizes and offsets of the parameter blocks in Python against those of the compiled C structures."""

from __future__ import annotations

import ctypes

import pytest

from ciuic_cli.kernels.parameters import MIRRORS

KERNEL_OF = {
    "CiuicLinear": "linear_bytes_n4",
    "CiuicTransform": "transform",
    "CiuicDecode": "decode_rows",
    "CiuicEmbedding": "embedding_rows",
    "CiuicLowRank": "lowrank_columns",
    "CiuicEncode": "encode_h8",
}


@pytest.mark.parametrize("name", MIRRORS)
def test_every_member_is_where_the_kernel_reads_it(libraries: dict[int, ctypes.CDLL], name: str) -> None:
    mirror = MIRRORS[name]
    for member, *_ in mirror._fields_:
        assert libraries[16].emu_offset(f"{name}.{member}".encode()) == getattr(mirror, member).offset, member


@pytest.mark.parametrize("name", KERNEL_OF)
def test_sizes_agree(libraries: dict[int, ctypes.CDLL], name: str) -> None:
    assert libraries[16].emu_parameter_bytes(KERNEL_OF[name].encode()) == ctypes.sizeof(MIRRORS[name])
