"""What exports need of llama.cpp, for tests: a converter of Llama's kind, and a quantizer of 32-blocks by `gguf`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from ciuic_cli.export.gguf.llama_cpp import LlamaCpp
from ciuic_cli.export.gguf.types import GgufType

KINDS = gguf.GGMLQuantizationType


class StandIn(LlamaCpp):
    """Writes the same files as the programs for the types that the package gguf can encode; keeps the calls.

    Importance is ignored by this rounding. `calls` has the types of every quantization, and its importance file.
    """

    def __init__(self) -> None:
        super().__init__(Path("converter"), Path("quantizer"))
        object.__setattr__(self, "calls", [])
        object.__setattr__(self, "help", "--tensor-type-file")

    calls: list[tuple[dict[str, str], int]]

    def convert(self, checkpoint: Path, out: Path) -> None:
        """A Llama checkpoint under GGUF's names, with rows of queries and keys exchanged as llama.cpp wants them."""
        config = json.loads((checkpoint / "config.json").read_text())
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
        writer = _writer(out, config)
        for name, value in sorted(load_file(checkpoint / "model.safetensors").items()):
            if "q_proj" in name or "k_proj" in name:
                value = _halves_alternating(
                    value, heads if "q_proj" in name else config["num_key_value_heads"]
                )
            target = names.get_name(name, try_suffixes=(".weight",))
            numbers = value.float().numpy()
            if value.dim() == 1:
                writer.add_tensor(target, numbers)
            else:
                writer.add_tensor(target, gguf.quants.quantize(numbers, KINDS.BF16), raw_dtype=KINDS.BF16)
        _finish(writer)

    def quantize(
        self,
        source: Path,
        out: Path,
        types: Mapping[str, GgufType],
        importance: Path,
        work: Path,
        file_type: int,
    ) -> None:
        self.calls.append(({name: kind.name for name, kind in types.items()}, file_type))
        assert importance.exists()
        reader = gguf.GGUFReader(source)
        writer = gguf.GGUFWriter(out, "llama")
        _copy_fields(reader, writer)
        for tensor in reader.tensors:
            if len(tensor.shape) == 1:
                writer.add_tensor(tensor.name, tensor.data)
                continue
            kind = KINDS[types[tensor.name].name] if tensor.name in types else KINDS.Q8_0
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, encode(numbers, kind), raw_dtype=kind)
        _finish(writer)

    def decode(self, source: Path, out: Path) -> None:
        reader = gguf.GGUFReader(source)
        writer = gguf.GGUFWriter(out, "llama")
        _copy_fields(reader, writer)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        _finish(writer)


def encode(numbers: NDArray[np.float32], kind: Any) -> NDArray[np.uint8]:
    """Rounded blocks. The package gguf cannot encode IQ4_NL, so its nearest values are searched here."""
    if kind is not KINDS.IQ4_NL:
        return gguf.quants.quantize(numbers, kind)
    values = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    blocks = numbers.reshape(-1, 32)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = (peak / values[0]).astype(np.float16)
    steps = blocks / np.where(scale == 0, 1, scale).astype(np.float32)
    codes = np.abs(steps[:, :, None] - values).argmin(2).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return np.hstack([scale.view(np.uint8), packed]).reshape(len(numbers), -1)


def _writer(out: Path, config: dict[str, Any]) -> gguf.GGUFWriter:
    """A file with what llama.cpp needs to know of the model, but no vocabulary."""
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config["vocab_size"])
    return writer


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, item in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, item.contents(), item.types[0])


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _halves_alternating(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Of each head, row i of the first half before row i of the second."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
