"""Writes the initial inputs of every target's corpus: `python tests/fuzz/seeds.py`. Fuzzing found the others."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
from targets import ARTIFACT_CONFIG, CONFIG, framed, small_shard

from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.sizes import codes_nbytes
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.transform import padded

CORPUS = Path(__file__).parent / "corpus"


def matrix(rows: int, cols: int, bits: list[int], rank: int = 0) -> PackedMatrix:
    """A random matrix whose bytes are pinned by the corpus; with `rank`, factors of 4 bits."""
    generator = np.random.default_rng([rows, cols, rank])
    row_bits = np.resize(np.array(bits, np.uint8), padded(rows) // 16)
    lowrank = (matrix(rank, cols, [4]), matrix(rank, rows, [4])) if rank else None
    codes = generator.integers(0, 256, codes_nbytes(row_bits, cols), np.uint8)
    scales = generator.integers(0, 256, rows, np.uint8)
    return PackedMatrix(MatrixHeader(rows, cols, 16, 0, 0.5, row_bits, scales), codes, lowrank)


def with_input_scales(plain: PackedMatrix, codes: np.ndarray) -> PackedMatrix:
    return replace(plain, header=replace(plain.header, input_scale=codes))


def seeds() -> dict[str, dict[str, bytes]]:
    """Initial inputs by target and file name."""
    entry = {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}
    several = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]},
        "a.weight_scale_inv": {"dtype": "F32", "shape": [1, 1], "data_offsets": [6, 10]},
        "b.weight": {"dtype": "I8", "shape": [1, 16], "data_offsets": [10, 26]},
        "b.scale": {"dtype": "F8_E8M0", "shape": [1, 1], "data_offsets": [26, 27]},
        "c": {"dtype": "F4", "shape": [2], "data_offsets": [27, 28]},
    }
    text = json.dumps(several).encode()
    index = {"metadata": {"total_size": 16}, "weight_map": {"u": "a.safetensors", "v": "b.safetensors"}}
    plain = matrix(20, 40, [4, 2])
    stack = ExpertStack((matrix(16, 16, [3]), matrix(16, 16, [0]), matrix(16, 16, [8])))
    blobs = {"w": plain.to_bytes(), "e": stack.to_bytes()}
    ends = [0, len(blobs["w"]), len(blobs["w"]) + len(blobs["e"])]
    header = {
        name: {"dtype": "U8", "shape": [len(blob)], "data_offsets": [ends[number], ends[number + 1]]}
        for number, (name, blob) in enumerate(blobs.items())
    }
    noise = random.Random(0).randbytes(200)
    return {
        "checkpoint": {
            "raw": b"\0" + small_shard("w"),
            "one": b"\1" + (60).to_bytes(2, "little") + json.dumps({"w": entry}).encode(),
            "several": b"\1" + (28).to_bytes(2, "little") + text,
            "index": b"\2" + json.dumps(index).encode(),
            "config": b"\3" + CONFIG.encode(),
            "pointer": b"\0version https://git-lfs.github.com/spec/v1\n",
        },
        "artifact": {
            "matrix": b"\0" + plain.to_bytes(),
            "scaled": b"\0" + with_input_scales(plain, np.arange(100, 140, dtype=np.uint8)).to_bytes(),
            "lowrank": b"\0" + matrix(32, 48, [2], rank=16).to_bytes(),
            "stack": b"\1" + stack.to_bytes(),
            "file": b"\2" + framed(json.dumps(header).encode(), b"".join(blobs.values())),
            "config": b"\3" + ARTIFACT_CONFIG.encode(),
            "any": b"\4" + noise,
        },
        "native": {f"function{which}": bytes([which, 1, 2, 6, 1]) + noise for which in range(5)},
    }


if __name__ == "__main__":
    for target, inputs in seeds().items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, content in inputs.items():
            (CORPUS / target / name).write_bytes(content)
