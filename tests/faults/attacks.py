"""Tools of the fault tests: damage a copy of a tiny checkpoint, run the real command, compare every file afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ciuic_cli
from ciuic_cli.artifact.writer import CHECKSUMS
from ciuic_cli.cli import app as cli

QUICK = ("--nsamples", "4", "--seqlen", "64", "--effort", "fast")
INDEX = "model.safetensors.index.json"
FAMILIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("llama", {}),
    ("llama", {"max_shard_size": "30KB"}),
    ("qwen2", {"max_shard_size": "20KB"}),
    ("deepseek_v3", {"max_shard_size": "60KB"}),
)
BASE_SEED = int(os.environ.get("CIUIC_FAULTS_SEED", "0"))
"""Seed of all random choices: which shard, tensor, byte and value a test damages."""


def seeded(count: int, campaign: int = 0) -> pytest.MarkDecorator:
    """Run the test with `count` seeds, argument `seed`; `make faults` runs it with `campaign` more."""
    seeds = [1000 * BASE_SEED + number for number in range(count + campaign)]
    more = [pytest.param(seed, marks=pytest.mark.campaign) for seed in seeds[count:]]
    return pytest.mark.parametrize("seed", [*seeds[:count], *more])


_opened_paths: list[list[str]] = []


def _record_open(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened_paths and event == "open" and isinstance(arguments[0], (str, bytes)):
        _opened_paths[-1].append(os.fsdecode(arguments[0]))


# An audit hook sees every way of opening a file; a monkeypatch of `open` does not.
sys.addaudithook(_record_open)


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    code: int
    stdout: str
    stderr: str
    opened: tuple[str, ...] = ()
    """Paths that Python opened, as they were given; recorded only for commands in this process."""

    def says(self, *words: str) -> None:
        """Assert that stderr contains all these texts."""
        for word in words:
            assert word in self.stderr, f"{word!r} is not in: {self.stderr}"

    def field(self, label: str) -> str:
        """The value of a line "  label: value" of an error message; empty if there is none."""
        lines = [line.strip() for line in self.stderr.splitlines()]
        return next((line[len(label) + 2 :] for line in lines if line.startswith(f"{label}: ")), "")


def invoke(*arguments: object) -> Outcome:
    """Run the command line in this process."""
    _opened_paths.append([])
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    return Outcome(done.exit_code, done.stdout, done.stderr, tuple(_opened_paths.pop()))


def command(*arguments: object) -> list[str]:
    """The words that run the command line in a process of its own."""
    return [sys.executable, "-m", "ciuic_cli", *map(str, arguments)]


def spawn(*arguments: object, **options: Any) -> Outcome:
    """Run the command line in a process of its own and wait for its end."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, timeout=300, **options
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def snapshot(folder: Path) -> dict[str, object]:
    """State of everything below a folder: modes, link targets, and a digest of files below 16 MiB (else the size)."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and status.st_size < 1 << 24:
            found[name] = (status.st_mode, hashlib.sha256(path.read_bytes()).hexdigest())
        else:
            found[name] = (status.st_mode, status.st_size if path.is_file() else 0)
    return found


def temporary_folders() -> set[str]:
    """Names of the temporary folders that the program made and has not removed."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("ciuic-")}


@dataclass
class Victim:
    """A copy of a checkpoint for a test to damage. folder: holds copy and output; random: makes the test's choices."""

    folder: Path
    text: Path
    random: random.Random
    model: Path = field(init=False)
    out: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.out = self.folder / "model", self.folder / "out"

    # --- parts of the checkpoint

    @property
    def shards(self) -> list[Path]:
        return sorted(self.model.glob("*.safetensors"))

    def shard(self) -> Path:
        """A random shard."""
        return self.random.choice(self.shards)

    def edit_config(self, **values: object) -> None:
        file = self.model / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    def edit_index(self, change: Callable[[dict[str, str]], object]) -> None:
        content = json.loads((self.model / INDEX).read_text())
        change(content["weight_map"])
        (self.model / INDEX).write_text(json.dumps(content))

    def edit_tensors(
        self, change: Callable[[dict[str, torch.Tensor]], object], file: Path | None = None
    ) -> None:
        file = file or self.shards[0]
        tensors = load_file(file)
        change(tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"}
        )

    # --- attacks

    def compress(self, *options: object, out: Path | None = None) -> Outcome:
        return invoke(*self.arguments(out), *options)

    def arguments(self, out: Path | None = None) -> list[object]:
        """Arguments of a quick `ciuic compress` of the copy."""
        out = out or self.out
        return [
            "compress",
            self.model,
            out,
            "--calibration",
            self.text,
            "--calibration-only",
            "--ratio",
            2.5,
            *QUICK,
        ]

    def succeeds(self, *options: object) -> tuple[Outcome, dict[str, Any]]:
        """Compress, assert success, and return the outcome and the memory report."""
        done = self.compress(*options)
        assert done.code == 0, done.stderr
        harmless(done)
        return done, json.loads((self.out / "memory_report.json").read_text())

    def refused(
        self,
        *words: str,
        code: int = 3,
        file: str | None = None,
        tensor: str | None = None,
        remedy: str | None = None,
        options: Sequence[object] = (),
        commands: Sequence[str] = ("compress", "replace", "inspect"),
    ) -> Outcome:
        """Assert that every command exits with `code` and one error message with these words, and changes no file.

        "replace" is compress with --force over an existing output.
        """
        done = Outcome(-1, "", "")
        for name in commands:
            if name == "replace":
                old_artifact(self.out)
            before, temporary = snapshot(self.folder), temporary_folders()
            if name == "inspect":
                done = invoke("inspect", self.model)
            else:
                done = self.compress(*options, *(["--force"] if name == "replace" else []))
            assert done.code == code, f"{name}: {done.code}, {done.stderr}"
            assert done.stdout == "", done.stdout
            harmless(done)
            assert done.stderr.count("error: ") == 1, done.stderr
            done.says(*words)
            assert done.field("try"), done.stderr
            for label, expected in (("file", file), ("tensor", tensor), ("try", remedy)):
                if expected is not None:
                    assert expected in done.field(label), f"{label} {expected!r}: {done.stderr}"
            assert snapshot(self.folder) == before
            assert temporary_folders() <= temporary
            if name == "replace":
                shutil.rmtree(self.out)
        return done


def old_artifact(out: Path) -> None:
    """Make an artifact folder that --force may replace."""
    out.mkdir(parents=True)
    (out / CHECKSUMS).write_text("old")


def harmless(done: Outcome) -> None:
    """Assert that the output contains no traceback and no terminal control characters."""
    assert "Traceback" not in done.stderr, done.stderr
    for text in (done.stdout, done.stderr):
        assert not any(ord(character) < 32 and character not in "\n\t\r" for character in text), repr(text)


# --- what a run left behind


def weights(out: Path) -> bytes:
    """All bytes of a folder's safetensors files."""
    return b"".join(file.read_bytes() for file in sorted(out.glob("*.safetensors")))


def unfinished(folder: Path) -> list[str]:
    """Names of files that a finished write would have renamed or removed."""
    return [p.name for p in folder.rglob("*") if p.name.endswith((".part", ".partial")) or ".tmp" in p.name]


# --- the bytes of a shard


def read_shard(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and tensor data of a safetensors file."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_shard(
    file: Path, header: Mapping[str, Any] | bytes, data: bytes, length: int | None = None
) -> None:
    """Write a safetensors file. header: JSON or raw bytes; length: the announced header length, if not the true one."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def names_by_offset(header: Mapping[str, Any]) -> list[str]:
    """Tensor names in the order of their data."""
    names = [name for name in header if name != "__metadata__"]
    return sorted(names, key=lambda name: header[name]["data_offsets"])


def run_with_event(v: Victim, step: str, event: Callable[[], object], **options: Any) -> None:
    """Compress, and call `event` once, just before the first progress report of `step`."""
    events = [event]

    def progress(what: str, done: int, total: int) -> None:
        if what == step and events:
            events.pop()()

    ciuic_cli.compress(
        v.model, v.out, calibration=[v.text], calibration_only=True, ratio=2.5, nsamples=4, seqlen=64, effort="fast",
        progress=progress, **options,
    )  # fmt: skip


def tensor_names(v: Victim) -> list[str]:
    """Names of all tensors of the checkpoint."""
    return [name for shard in v.shards for name in load_file(shard)]


def finite_predictions(folder: Path) -> None:
    """Assert that the artifact loads and predicts finite logits."""
    model = ciuic_cli.load(folder)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(3, 40)[None]).logits).all()
