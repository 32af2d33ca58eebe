"""How the campaign attacks: a copy of a tiny checkpoint is spoilt, the real command runs, everything is compared."""

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
"""Another number gives the campaign other shards, tensors and bytes."""


def seeded(count: int, campaign: int = 0) -> pytest.MarkDecorator:
    """Run the test with `count` seeds, argument `seed`; `make faults` runs it with `campaign` more."""
    seeds = [1000 * BASE_SEED + number for number in range(count + campaign)]
    more = [pytest.param(seed, marks=pytest.mark.campaign) for seed in seeds[count:]]
    return pytest.mark.parametrize("seed", [*seeds[:count], *more])


_heard: list[list[str]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _heard and event == "open" and isinstance(arguments[0], (str, bytes)):
        _heard[-1].append(os.fsdecode(arguments[0]))


sys.addaudithook(_hear)  # no monkeypatch reaches every way of opening a file


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    stdout: str
    stderr: str
    opened: tuple[str, ...] = ()
    """Paths that Python opened, as they were given; only of commands in this process."""

    def says(self, *words: str) -> None:
        for word in words:
            assert word in self.stderr, f"{word!r} is not in: {self.stderr}"

    def field(self, label: str) -> str:
        """The value of a line "  label: value" of an error message; empty if there is none."""
        lines = [line.strip() for line in self.stderr.splitlines()]
        return next((line[len(label) + 2 :] for line in lines if line.startswith(f"{label}: ")), "")


def invoke(*arguments: object) -> Outcome:
    """The command line in this process."""
    _heard.append([])
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    return Outcome(done.exit_code, done.stdout, done.stderr, tuple(_heard.pop()))


def command(*arguments: object) -> list[str]:
    """The same as a process of its own."""
    return [sys.executable, "-m", "ciuic_cli", *map(str, arguments)]


def spawn(*arguments: object, **options: Any) -> Outcome:
    """Run the command as a process and wait for it."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, timeout=300, **options
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def snapshot(folder: Path) -> dict[str, object]:
    """Everything below a folder: kinds, modes, links, and contents."""
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


def bystanders() -> set[str]:
    """The program's own temporary folders."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("ciuic-")}


@dataclass
class Victim:
    """A copy of a checkpoint in a folder of its own, to be spoilt; `random` decides how."""

    folder: Path
    text: Path
    random: random.Random
    model: Path = field(init=False)
    out: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.out = self.folder / "model", self.folder / "out"

    # --- the parts of it

    @property
    def shards(self) -> list[Path]:
        return sorted(self.model.glob("*.safetensors"))

    def shard(self) -> Path:
        """Any of its shards."""
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
        """Of a quick `ciuic compress` of it."""
        out = out or self.out
        return ["compress", self.model, out, "--calibration", self.text, "--ratio", 2.5, *QUICK]

    def succeeds(self, *options: object) -> tuple[Outcome, dict[str, Any]]:
        """Compress; returns what was said and the report."""
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
        """Every command ends with `code` and one message with these words, and touches nothing.

        "replace" is compress with --force over a folder that is there.
        """
        done = Outcome(-1, "", "")
        for name in commands:
            if name == "replace":
                old_artifact(self.out)
            before, temporary = snapshot(self.folder), bystanders()
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
            assert bystanders() <= temporary
            if name == "replace":
                shutil.rmtree(self.out)
        return done


def old_artifact(out: Path) -> None:
    """What --force may replace."""
    out.mkdir(parents=True)
    (out / CHECKSUMS).write_text("old")


def harmless(done: Outcome) -> None:
    """No traceback, and nothing that a terminal would obey."""
    assert "Traceback" not in done.stderr, done.stderr
    for text in (done.stdout, done.stderr):
        assert not any(ord(character) < 32 and character not in "\n\t\r" for character in text), repr(text)


# --- what a run left


def weights(out: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(out.glob("*.safetensors")))


def unfinished(folder: Path) -> list[str]:
    """Files that a finished write would have renamed or removed."""
    return [p.name for p in folder.rglob("*") if p.name.endswith((".part", ".partial")) or ".tmp" in p.name]


# --- the bytes of a shard


def take_apart(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def put_together(
    file: Path, header: Mapping[str, Any] | bytes, data: bytes, length: int | None = None
) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def entries(header: Mapping[str, Any]) -> list[str]:
    """The tensors' names in the order of their bytes."""
    names = [name for name in header if name != "__metadata__"]
    return sorted(names, key=lambda name: header[name]["data_offsets"])


def run_with(v: Victim, step: str, event: Callable[[], object], **options: Any) -> None:
    """A run during which something happens, before its first report of a step."""
    events = [event]

    def progress(what: str, done: int, total: int) -> None:
        if what == step and events:
            events.pop()()

    ciuic_cli.compress(
        v.model, v.out, calibration=[v.text], ratio=2.5, nsamples=4, seqlen=64, effort="fast", progress=progress,
        **options,
    )  # fmt: skip


def names_of(v: Victim) -> list[str]:
    return [name for shard in v.shards for name in load_file(shard)]


def finite_predictions(folder: Path) -> None:
    model = ciuic_cli.load(folder)
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(3, 40)[None]).logits).all()
