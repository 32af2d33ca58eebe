"""Faults 39 and 40: damaged, newer and mixed artifacts, and a closed stdout."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attacks import (
    BASE_SEED,
    QUICK,
    Victim,
    command,
    harmless,
    invoke,
    read_shard,
    seeded,
    snapshot,
    write_shard,
)
from transformers import AutoModel, AutoModelForCausalLM

import ciuic_cli
from ciuic_cli.artifact.schema import FORMAT_VERSION
from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.exit_codes import run
from ciuic_cli.errors import InputError

sys.path.insert(0, str(Path(__file__).parent / "campaigns"))

from corrupting import Done

Make = Callable[..., Victim]
HARNESS = Path(__file__).parent / "campaigns" / "corrupting.py"


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    """A copy of the artifact, to damage."""
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def flip(file: Path, generator: random.Random, begin: int = 0, end: int | None = None) -> int:
    """Flip a random bit of the bytes from begin to end - 1; returns the byte's offset."""
    raw = bytearray(file.read_bytes())
    place = generator.randrange(begin, len(raw) if end is None else end)
    raw[place] ^= 1 << generator.randrange(8)
    file.write_bytes(raw)
    return place


@seeded(5, campaign=20)
@pytest.mark.parametrize("where", ["header", "blob", "payload"])
def test_fault_39_a_flipped_bit_is_found_by_verify(copy: Path, seed: int, where: str) -> None:
    generator = random.Random(seed)
    file = copy / "model.safetensors"
    header, _ = read_shard(file)
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    blobs = [entry["data_offsets"][0] for name, entry in header.items() if entry.get("dtype") == "U8"]
    blob = begin + generator.choice(blobs)
    span = {"header": (0, begin), "blob": (blob, blob + 80), "payload": (begin, None)}[where]
    flip(file, generator, *span)
    before = snapshot(copy)
    done = invoke("inspect", copy, "--verify")
    assert done.code == 3 and "model.safetensors" in done.field("file") and done.field("try"), done.stderr
    harmless(done)
    assert snapshot(copy) == before


@seeded(2, campaign=6)
@pytest.mark.parametrize("name", ["config.json", "memory_report.json", "tokenizer.json", CHECKSUMS])
def test_fault_39_every_other_file_is_verified_too(copy: Path, seed: int, name: str) -> None:
    flip(copy / name, random.Random(seed))
    done = invoke("inspect", copy, "--verify")
    assert done.code == 3 and (name == CHECKSUMS or name in done.field("file")), done.stderr
    harmless(done)


@seeded(1, campaign=6)
def test_fault_39_loading_compares_checksums_on_request(copy: Path, seed: int) -> None:
    assert ciuic_cli.load(copy, verify=True) is not None
    file = copy / "model.safetensors"
    flip(file, random.Random(seed), 8 + int.from_bytes(file.read_bytes()[:8], "little") + 5000)
    with pytest.raises(InputError, match="checksum") as caught:
        ciuic_cli.load(copy, verify=True)
    assert caught.value.file == str(file)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_fault_39_a_config_that_counts_fewer_layers(
    victim: Make, copy: Path, text: Path, count: int, kept: bool
) -> None:
    """The model would predict without its last layers. A kept multi-token-prediction layer is no such layer."""
    if kept:
        v = victim(0, "deepseek_v3")
        add_prediction_layer(v)
        v.succeeds("--mtp", "keep")
        copy = v.out
        assert ciuic_cli.load(copy) is not None and invoke("inspect", copy).code == 0
    edit_config(copy, num_hidden_layers=count)
    for arguments in (["inspect", copy], ["eval", copy, "--text", text, "--seqlen", 64]):
        done = invoke(*arguments)
        assert done.code == 3 and "counts fewer layers" in done.stderr, done.stderr
        assert done.field("file").endswith("config.json") and ".layers." in done.field("tensor")
        assert done.field("try")
        harmless(done)
    for load in (ciuic_cli.load, AutoModelForCausalLM.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(InputError, match="counts fewer layers"):
            load(copy)


def add_prediction_layer(v: Victim) -> None:
    """Add a multi-token-prediction layer with the tensors of the last layer."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = {n: t for n, t in tensors.items() if n.startswith("model.layers.2.")}
        tensors.update({n.replace("layers.2.", "layers.3."): t.clone() for n, t in last.items()})
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(56, 112, dtype=torch.bfloat16)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"model.layers.3.{norm}.weight"] = torch.ones(56, dtype=torch.bfloat16)

    v.edit_config(num_nextn_predict_layers=1)
    v.edit_tensors(add)


IMPOSSIBLE = {
    "magic": (0, [0, 255]),
    "window": (4, [0, 11, 17, 255]),
    "flags": (5, [1, 2, 128]),
    "block": (6, [0, 40, 255]),
    "rows": (8, [0, 1, 255]),
    "rows high": (11, [1, 127, 255]),
    "columns": (12, [0, 1, 255]),
    "columns high": (15, [1, 255]),
    "scale base": (23, [0xFF, 0x80, 0x7F]),
    "rank": (24, [1, 255]),
    "low-rank bytes": (28, [1, 16]),
    "bits": (32, [1, 7, 9, 255]),
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_fault_39_impossible_fields_are_refused_before_a_kernel_sees_them(
    copy: Path, field: str, monkeypatch: pytest.MonkeyPatch, text: Path
) -> None:
    def seen(*arguments: object, **options: object) -> None:
        raise AssertionError("a kernel saw it")

    for function in ("decode", "decode_rows", "matmul"):
        monkeypatch.setattr(f"ciuic_cli.codecs.trellis.{function}", seen)
    file = copy / "model.safetensors"
    good = file.read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    header, _ = read_shard(file)
    plain = next(name for name, e in header.items() if name.endswith("lm_head.weight") and e["dtype"] == "U8")
    start = begin + header[plain]["data_offsets"][0]
    place, values = IMPOSSIBLE[field]
    for value in values:
        if good[start + place] == value:
            continue
        file.write_bytes(good[: start + place] + bytes([value]) + good[start + place + 1 :])
        for words in (["inspect", copy], ["eval", copy, "--text", text, "--seqlen", 64, "--limit", 1]):
            done = invoke(*words)
            assert done.code == 3, (field, value, done.stderr)
            assert plain in done.field("tensor") and done.field("file") and done.field("try"), done.stderr
            harmless(done)


@seeded(2, campaign=6)
def test_fault_39_a_dense_tensor_of_another_shape(copy: Path, seed: int, text: Path) -> None:
    generator = random.Random(seed)
    file = copy / "model.safetensors"
    header, data = read_shard(file)
    name = generator.choice([n for n, e in header.items() if e.get("dtype") == "BF16"])
    if seed % 2:
        header[name]["shape"] = [*header[name]["shape"], 1]
    else:
        header[name]["dtype"] = "I16"
    write_shard(file, header, data)
    for words in (["inspect", copy], ["eval", copy, "--text", text, "--seqlen", 64, "--limit", 1]):
        done = invoke(*words)
        assert done.code == 3 and name in done.field("tensor") and done.field("try"), done.stderr
        harmless(done)


@pytest.mark.parametrize("values", [{"num_experts_per_tok": 0}, {"is_encoder_decoder": True}], ids=str)
def test_a_config_that_no_forward_pass_survives_is_refused(
    copy: Path, text: Path, values: dict[str, object]
) -> None:
    edit_config(copy, **values)
    for words in (["inspect", copy], ["eval", copy, "--text", text, "--seqlen", 64, "--limit", 1]):
        done = invoke(*words)
        assert done.code == 3 and next(iter(values)) in done.stderr, done.stderr
        assert "config.json" in done.field("file") and done.field("try")
        harmless(done)


def test_outputs_without_names_can_be_asked_for(copy: Path, text: Path) -> None:
    edit_config(copy, return_dict=False)
    done = invoke("eval", copy, "--text", text, "--seqlen", 64, "--limit", 1)
    assert done.code == 0, done.stderr


def test_a_generation_config_that_cannot_be_read_is_named(
    copy: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers by itself would ignore the error and continue without the file."""
    whole = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == "generation_config.json":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    done = invoke("eval", copy, "--text", text, "--seqlen", 64, "--limit", 1)
    assert done.code == 5 and "Input/output error" in done.stderr, done.stderr
    assert "generation_config.json" in done.field("file") and done.field("try")


def test_a_fault_of_our_own_modules_is_not_blamed_on_the_folder(
    copy: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr("ciuic_cli.runtime.ops.linear", broken)
    done = invoke("eval", copy, "--text", text, "--seqlen", 64, "--limit", 1)
    assert done.code == 1 and "a bug in ciuic: RuntimeError: surprise" in done.stderr, done.stderr


def test_an_artifact_that_is_replaced_while_it_is_read_is_not_called_damaged(
    copy: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(found: object) -> object:
        copy.rename(copy.with_name("old"))
        shutil.copytree(artifact, copy)
        raise InputError("damaged")

    monkeypatch.setattr("ciuic_cli.report.inspection.meta_model", replaced)
    done = invoke("inspect", copy)
    assert done.code == 3 and "was replaced" in done.stderr and "again" in done.field("try"), done.stderr


# --- 39: campaigns of changed bytes


def corruptions(count: int, seed: int, *options: str) -> dict[str, tuple[int, int, int]]:
    """Counts by the kind of the changed byte: (refused when loaded, other text generated, same text generated)."""
    done = subprocess.run(
        [sys.executable, str(HARNESS), "--count", str(count), "--seed", str(seed), *options],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    rows = re.findall(r"^(\S.*?)\s{2,}(\d+)\s+(\d+)\s+(\d+)$", done.stdout, re.MULTILINE)
    return {kind: (int(refused), int(other), int(same)) for kind, refused, other, same in rows}


REFUSAL = "error: the artifact is damaged\n  file: out/config.json\n  try: fetch it again\n"


@pytest.mark.parametrize(
    ("code", "said", "clean"),
    [
        (0, "", True),
        (0, "warning: slow\n", True),
        (3, REFUSAL, True),
        (0, REFUSAL, False),
        (3, "", False),
        (3, REFUSAL.replace("try", "so"), False),
        (3, REFUSAL + REFUSAL, False),
        (1, REFUSAL, False),
        (-11, "", False),
        (-14, "", False),
        (3, "Traceback (most recent call last):\n" + REFUSAL, False),
        (0, "decode_kernel.cpp:7:1: runtime error: load of misaligned address", False),
        (3, "==1==ERROR: AddressSanitizer: heap-buffer-overflow\n" + REFUSAL, False),
    ],
)
def test_what_counts_as_a_finding(code: int, said: str, clean: bool) -> None:
    assert Done(code, "", said, peak=0).clean == clean


def test_fault_39_changed_bytes_are_found_and_do_no_harm() -> None:
    assert sum(corruptions(16, BASE_SEED, "--tiny")["all"]) == 16


@pytest.mark.campaign
def test_fault_39_two_hundred_changed_bytes() -> None:
    """`make corruptions` changes a thousand, under the sanitizers."""
    found = corruptions(200, 1 + BASE_SEED)
    assert sum(found["all"]) == 200
    refused, other, _ = found["weights: start of a blob"]
    assert refused > 3 and other > 3, "only bytes without effect were changed"
    assert found["weights: header"][0] > 10 and len(found) > 9


# --- 40: newer and spliced artifacts, a closed stdout


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 10**9])
def test_fault_40_a_newer_schema_version(copy: Path, version: int, text: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["format_version"] = version
    (copy / "config.json").write_text(json.dumps(config))
    for words in (
        ["inspect", copy],
        ["eval", copy, "--text", text],
        ["bench", copy, "-p", 4, "-n", 1, "-r", 1],
    ):
        done = invoke(*words)
        assert done.code == 3 and f"version {version}" in done.stderr, done.stderr
        assert "config.json" in done.field("file") and "update ciuic" in done.field("try")
        harmless(done)


@seeded(1, campaign=4)
@pytest.mark.parametrize("other", ["llama", "deepseek_v3"])
def test_fault_40_two_artifacts_spliced(
    copy: Path, tiny_checkpoint: Callable[..., Path], text: Path, tmp_path: Path, seed: int, other: str
) -> None:
    second = tmp_path / "second"
    made = invoke(
        "compress",
        tiny_checkpoint(other),
        second,
        "--calibration",
        text,
        "--calibration-only",
        "--ratio",
        1.9,
        "--seed",
        seed,
        *QUICK,
    )
    assert made.code == 0, made.stderr
    shutil.copy(second / "model.safetensors", copy / "model.safetensors")
    verified = invoke("inspect", copy, "--verify")
    assert verified.code == 3 and "model.safetensors" in verified.field("file"), verified.stderr
    if other == "llama":
        for words in (["inspect", copy], ["eval", copy, "--text", text, "--seqlen", 64, "--limit", 1]):
            done = invoke(*words)
            assert done.code == 3 and done.field("file") and done.field("try"), done.stderr
            harmless(done)


@pytest.mark.parametrize(
    "options",
    [["--tensors"], *(pytest.param(more, marks=pytest.mark.campaign) for more in (["--json"], []))],
)
def test_fault_40_stdout_closed_early(artifact: Path, options: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command("inspect", artifact, *options), stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.campaign
def test_fault_40_stdout_on_a_full_disk_and_no_stdout(artifact: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("inspect", artifact), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 5 and "Traceback" not in done.stderr and "Exception" not in done.stderr, (
        done.stderr
    )
    words = " ".join(command("inspect", artifact))
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(["sh", "-c", f"{words} {closed}"], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_an_interrupt_that_comes_out_as_another_error_is_still_an_interrupt() -> None:
    def swallow() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise SystemError("initialization failed") from None

    assert run(Console(stdout=sys.stderr), swallow) == 130
