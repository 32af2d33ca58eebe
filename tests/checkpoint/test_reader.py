"""Reading tensors, finding their scales, and faults 18 and 24: tensors in two shards, scales that do not fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ciuic_cli.checkpoint import formats
from ciuic_cli.checkpoint.formats import TORCH_DTYPES
from ciuic_cli.checkpoint.reader import Checkpoint, open_checkpoint
from ciuic_cli.checkpoint.shards import INDEX_NAME
from ciuic_cli.errors import EnvironmentFault, InputError


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def test_every_dtype_is_read_back_exactly(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in TORCH_DTYPES.items():
        raw = torch.randint(0, 2, (6, 4 * dtype.itemsize), generator=generator, dtype=torch.uint8)
        tensors[f"t_{name}"] = raw.view(dtype)
    tensors = {name: value for name, value in tensors.items() if "FNUZ" not in name and "C64" not in name}
    opened = checkpoint(tmp_path / "m", tensors)
    for name, value in tensors.items():
        found = opened.read(name)
        assert found.dtype == value.dtype and found.shape == value.shape
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)), name
        part = opened.read(name, (2, 5))
        assert torch.equal(part.view(torch.uint8), value[2:5].contiguous().view(torch.uint8)), name


def test_scalars_empty_tensors_and_wrong_rows(tmp_path: Path) -> None:
    opened = checkpoint(
        tmp_path / "m", {"s": torch.tensor(2.5), "e": torch.zeros(0, 3), "w": torch.ones(4, 2)}
    )
    assert opened.read("s").item() == 2.5 and opened.read("e").shape == (0, 3)
    assert opened.read("w", (4, 4)).shape == (0, 2)
    for rows in [(-1, 2), (0, 5), (3, 2)]:
        with pytest.raises(ValueError, match="rows"):
            opened.read("w", rows)
    with pytest.raises(InputError, match="no such tensor") as caught:
        opened.read("none")
    assert caught.value.tensor == "none"


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "m", {"w": torch.ones(100)})
    os.truncate(tmp_path / "m" / "model.safetensors", 200)
    with pytest.raises(InputError, match="changed since it was opened") as caught:
        opened.read("w")
    assert caught.value.tensor == "w"
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(EnvironmentFault, match="cannot read"):
        opened.read("w")


def test_reading_one_tensor_does_not_take_the_memory_of_the_file(tmp_path: Path) -> None:
    import resource

    opened = checkpoint(
        tmp_path / "m", {f"w{index}": torch.ones(8 << 20) for index in range(8)}
    )  # 8 x 32 MiB
    opened.read("w0")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(8):
        assert opened.read(f"w{index}")[-1] == 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 100 << 20


def test_18_one_tensor_in_two_shards(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m", {"w": torch.ones(2)})
    save_file({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / "m" / "b.safetensors")
    index = {"weight_map": {"w": "model.safetensors", "v": "b.safetensors"}}
    (tmp_path / "m" / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(InputError, match="two shards") as caught:
        open_checkpoint(tmp_path / "m")
    assert caught.value.tensor == "w"


def test_the_index_must_agree_with_the_shards(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m", {"w": torch.ones(2), "x": torch.ones(2)})
    index = {"weight_map": {"w": "model.safetensors", "lost": "model.safetensors"}}
    (tmp_path / "m" / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(InputError, match="no shard has: lost"):
        open_checkpoint(tmp_path / "m")
    (tmp_path / "m" / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert any("not in the index: x" in warning for warning in open_checkpoint(tmp_path / "m").warnings)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
def test_fp8_finds_its_scale_under_each_name(tmp_path: Path, suffix: str) -> None:
    weight, scale = fp8(40, 30), torch.rand(3, 2) + 0.5
    tensors = {"a.weight": weight, f"a.{suffix}": scale}
    opened = checkpoint(
        tmp_path / "m", tensors, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}
    )
    expected = weight.float() * scale.repeat_interleave(16, 0)[:40].repeat_interleave(16, 1)[:, :30]
    assert opened.scales == {"a.weight": f"a.{suffix}"}
    assert torch.equal(opened.read_decoded("a.weight"), expected)
    assert torch.equal(opened.read_decoded("a.weight", (15, 33)), expected[15:33])
    assert opened.decoded_shape("a.weight") == (40, 30)


def test_the_block_size_defaults_to_128(tmp_path: Path) -> None:
    weight, scale = fp8(130, 257), torch.rand(2, 3) + 0.5
    opened = checkpoint(tmp_path / "m", {"a.weight": weight, "a.weight_scale_inv": scale})
    found = opened.read_decoded("a.weight")
    assert found.dtype == torch.float32
    assert torch.equal(found[128:, 256:], weight[128:, 256:].float() * scale[1, 2])
    assert torch.equal(found[:128, :128], weight[:128, :128].float() * scale[0, 0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_fp4_experts_as_v4_stores_them(tmp_path: Path, dtype: torch.dtype) -> None:
    packed = torch.randint(0, 256, (6, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale = torch.randint(120, 130, (6, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    opened = checkpoint(tmp_path / "m", {"w1.weight": packed.view(dtype), "w1.scale": scale})
    assert opened.decoded_shape("w1.weight") == (6, 96)
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
    found = opened.read_decoded("w1.weight")
    row, col = 4, 77
    nibble = (packed[row, col // 2].item() >> 4) & 15
    assert found[row, col] == values[nibble] * 2.0 ** (scale.view(torch.uint8)[row, col // 32].item() - 127)
    assert torch.equal(opened.read_decoded("w1.weight", (2, 5)), found[2:5])


def test_a_new_format_is_one_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four codes per int16, one scale per 8 values: read by an opened checkpoint without a change elsewhere."""
    values = tuple(float(code**2 - 40) for code in range(16))
    row = formats.NumberFormat("squares", 4, values, packed_in=("I16",), scale_block=(1, 8))
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, row))
    codes = torch.randint(0, 16, (5, 24), generator=torch.Generator().manual_seed(0))
    packed = (codes.reshape(5, 6, 4) << torch.tensor([0, 4, 8, 12])).sum(-1).to(torch.int16)
    scale = torch.rand(5, 3) + 0.5
    opened = checkpoint(tmp_path / "m", {"a.weight": packed, "a.weight_scale": scale, "b": packed.clone()})
    found = opened.format_of("a.weight")
    assert found is not None and found.name == "squares" and opened.format_of("b") is None
    assert opened.decoded_shape("a.weight") == (5, 24) and opened.decoded_shape("b") == (5, 6)
    expected = torch.tensor(values)[codes] * scale.repeat_interleave(8, 1)
    assert torch.equal(opened.read_decoded("a.weight"), expected)
    assert torch.equal(opened.read_decoded("a.weight", (1, 3)), expected[1:3])
    with pytest.raises(InputError, match=r"needs \(5, 3\)"):
        checkpoint(tmp_path / "n", {"a.weight": packed, "a.weight_scale": torch.ones(5, 4)})


def test_rows_of_f4_end_with_a_whole_byte() -> None:
    assert formats.stored_shape("F4", (3, 6)) == (3, 3) and formats.stored_shape("F32", (3, 5)) == (3, 5)
    for shape in ((3, 5), ()):
        with pytest.raises(ValueError, match="must fill whole bytes"):
            formats.stored_shape("F4", shape)


def test_24_fp8_without_its_scale(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"without its scale.*a\.weight_scale_inv") as caught:
        checkpoint(tmp_path / "m", {"a.weight": fp8(4, 4)})
    assert caught.value.tensor == "a.weight" and caught.value.exit_code == 3


def test_24_fp8_with_a_scale_of_the_wrong_shape(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs \(2, 3\)") as caught:
        checkpoint(tmp_path / "m", {"a.weight": fp8(130, 257), "a.weight_scale_inv": torch.ones(3, 2)})
    assert caught.value.tensor == "a.weight"


def test_24_one_scale_per_tensor_only_if_the_config_states_no_block(tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(130, 257), "a.weight_scale": torch.tensor([0.5])}
    section = {"quant_method": "fp8", "weight_block_size": None}
    opened = checkpoint(tmp_path / "m", tensors, quantization_config=section)
    assert torch.equal(opened.read_decoded("a.weight"), tensors["a.weight"].float() * 0.5)
    section["weight_block_size"] = [128, 128]
    with pytest.raises(InputError, match=r"needs \(2, 3\)") as caught:
        checkpoint(tmp_path / "n", tensors, quantization_config=section)
    assert caught.value.tensor == "a.weight"


def test_24_a_weight_with_two_scales(tmp_path: Path) -> None:
    scales = {name: torch.ones(1, 1) for name in ("a.weight_scale_inv", "a.weight_scale")}
    with pytest.raises(InputError, match=r"a\.weight_scale_inv and a\.weight_scale") as caught:
        checkpoint(tmp_path / "m", {"a.weight": fp8(4, 4), **scales})
    assert caught.value.tensor == "a.weight" and caught.value.file


@pytest.mark.parametrize("block", [[128], [0, 128], "128", [1.5, 2]])
def test_an_impossible_block_size(tmp_path: Path, block: object) -> None:
    section = {"quant_method": "fp8", "weight_block_size": block}
    tensors = {"a.weight": fp8(4, 4), "a.weight_scale_inv": torch.ones(1, 2)}
    with pytest.raises(InputError, match="weight_block_size"):
        checkpoint(tmp_path / "m", tensors, quantization_config=section)


@pytest.mark.parametrize(
    ("method", "message"),
    [("gptq", "quantized with 'gptq'"), ("ciuic", "ciuic artifact"), ("bitsandbytes", "bits")],
)
def test_already_quantized_checkpoints_are_refused(tmp_path: Path, method: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        checkpoint(tmp_path / "m", {"w": torch.ones(2)}, quantization_config={"quant_method": method})
    assert "original" in (caught.value.remedy or "")
