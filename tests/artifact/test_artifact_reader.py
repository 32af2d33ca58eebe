"""Opening an artifact from its headers: its content, and the damage that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ciuic_cli.artifact.reader import check_format, open_artifact, read_blobs
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import blob_of, random_matrix
from ciuic_cli.errors import InputError

TENSORS = {
    "norm.weight": torch.ones(20, dtype=torch.bfloat16),
    "proj.weight": blob_of(random_matrix(48, 20)),
    "experts.down_proj": blob_of(
        ExpertStack((random_matrix(20, 24), random_matrix(20, 24, 0), random_matrix(20, 24, 3)))
    ),
}


def write(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS, **fields: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": "ciuic", "format_version": 1, **fields}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return folder


def test_tensors_blobs_and_config(tmp_path: Path) -> None:
    artifact = open_artifact(write(tmp_path, bits_per_weight=4.1))
    assert set(artifact.tensors) == set(TENSORS)
    assert {name: found.shape for name, found in artifact.blobs.items()} == {
        "proj.weight": (48, 20),
        "experts.down_proj": (3, 20, 24),
    }
    assert artifact.blobs["proj.weight"].entry.nbytes == TENSORS["proj.weight"].numel()
    assert artifact.file_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert artifact.quantization["bits_per_weight"] == 4.1


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is resident")
def test_reading_headers_leaves_few_pages_resident(tmp_path: Path) -> None:
    stack = ExpertStack(tuple(random_matrix(512, 512) for _ in range(8)))
    artifact = open_artifact(write(tmp_path, {f"{layer}.down_proj": blob_of(stack) for layer in range(8)}))
    for found in artifact.blobs.values():
        with found.matrices() as matrices:
            assert len(matrices) == 8
    mapped, resident = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):  # the first line of a mapping, with its file
            mapped = bool(rest) and rest[-1] == str(tmp_path / "model.safetensors")
        elif mapped and key == "Rss:":
            resident += int(rest[0]) << 10
    assert resident < artifact.file_bytes / 8, "headers alone were looked at, and let go"


def test_shards_of_two_artifacts(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"proj.weight": TENSORS["proj.weight"]}, tmp_path / "b.safetensors")
    index = {"norm.weight": "a.safetensors", "other.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(InputError, match="in two files") as caught:
        open_artifact(tmp_path)
    assert caught.value.tensor == "proj.weight"
    save_file({"third.weight": torch.ones(3)}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match=r"names 1 tensor.*other\.weight"):
        open_artifact(tmp_path)


@pytest.mark.parametrize("version", [0, -1, 1.5, True, None, "1"])
def test_invalid_format_versions(version: Any) -> None:
    with pytest.raises(InputError, match="not a version number"):
        check_format({"format_version": version})


def test_a_newer_version_names_file_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"version 7.*reads up to 3.*update ciuic") as caught:
        open_artifact(write(tmp_path, format_version=7))
    assert caught.value.exit_code == 3 and str(caught.value.file).endswith("config.json")


@pytest.mark.parametrize(
    "config", [{}, {"quantization_config": {"quant_method": "gptq"}}, {"quantization_config": []}]
)
def test_models_of_other_formats(config: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="not a ciuic artifact"):
        open_artifact(tmp_path)


def corrupted(name: str, offset: int, value: int) -> dict[str, torch.Tensor]:
    damaged = TENSORS[name].clone()
    damaged[offset] = value
    return TENSORS | {name: damaged}


@pytest.mark.parametrize(
    ("name", "offset", "value", "message"),
    [
        ("proj.weight", 0, 0, "not a compressed matrix"),
        ("proj.weight", 4, 99, "trellis state bits"),
        ("proj.weight", 5, 8, "flags"),
        ("proj.weight", 5, 1, "low-rank"),
        ("proj.weight", 6, 9, "shape"),
        ("proj.weight", 9, 16, "bytes"),
        ("proj.weight", 11, 0xFF, "shape"),
        ("proj.weight", 12, 0, "shape"),
        ("proj.weight", 23, 0xFF, "scale"),
        ("proj.weight", 24, 3, "low-rank"),
        ("proj.weight", 33, 9, "bits per weight"),
        ("proj.weight", 33, 8, "bytes"),
        ("experts.down_proj", 4, 4, "offsets"),
        ("experts.down_proj", 7, 0xFF, "experts"),
        ("experts.down_proj", 8, 19, "stack"),
        ("experts.down_proj", 23, 1, "offsets"),
        ("experts.down_proj", 48, 0, "compressed matrix"),
    ],
)
def test_impossible_fields(name: str, offset: int, value: int, message: str, tmp_path: Path) -> None:
    write(tmp_path, corrupted(name, offset, value))
    with pytest.raises(InputError, match=message) as caught:
        open_artifact(tmp_path)
    assert caught.value.tensor is not None and name in caught.value.tensor
    assert str(caught.value.file).endswith("model.safetensors") and caught.value.remedy


@pytest.mark.parametrize("change", [-16, -1, 1, 16])
def test_blobs_of_another_length(change: int, tmp_path: Path) -> None:
    data = TENSORS["proj.weight"]
    longer = torch.cat((data, torch.zeros(max(change, 0), dtype=torch.uint8)))
    write(tmp_path, TENSORS | {"proj.weight": longer[: data.numel() + change].clone()})
    with pytest.raises(InputError, match="bytes"):
        open_artifact(tmp_path)


def test_every_header_bit_is_noticed_or_harmless(tmp_path: Path) -> None:
    """A bit flip in a blob's header is refused, or the header still describes exactly the blob's bytes.

    A changed shape is refused later, when it is compared with the model.
    """
    data = TENSORS["proj.weight"]
    refused = 0
    for bit in range(8 * 35):
        damaged = data.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        save_file({"proj.weight": damaged}, tmp_path / "model.safetensors")
        try:
            read_blobs([tmp_path / "model.safetensors"])
        except InputError:
            refused += 1
        else:
            assert PackedMatrix.from_buffer(damaged, where="").nbytes == data.numel(), bit
    assert refused > 200  # any seed, and most scale bases, are valid


def test_truncated_file(tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(InputError, match="truncated"):
        open_artifact(tmp_path)
