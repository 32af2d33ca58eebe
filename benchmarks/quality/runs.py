"""Makes each contestant's model: environments, jobs in them, and results kept from one run to the next."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contestants import OURS, PEERS, Contestant
from peers.job import tensor_bytes
from safetensors.torch import save_file

import ciuic_cli

SCRIPTS = Path(__file__).parent / "peers"
VARIANT = Path(__file__).with_name("variant.py")


class Failure(Exception):
    """A step of one contestant failed. step: "install", "quantize" or "evaluate"; str(): the reason in one line."""

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(reason)
        self.step = step


def reason_of(log: str) -> str:
    """The last line of a log with the word "error", else its last line, without what a progress bar has overwritten."""
    lines = [line.rsplit("\r", 1)[-1].strip() for line in log.split("\n")]
    lines = [line for line in lines if line] or ["no output"]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])[:300]


def digest(*parts: Any) -> str:
    """A short name for any values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def contents(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def files_digest(folder: Path, patterns: tuple[str, ...]) -> str:
    """A digest of the matching files in and below a folder: a change of one makes its results stale."""
    files = sorted({file for pattern in patterns for file in folder.rglob(pattern)})
    return digest([(str(file.relative_to(folder)), contents(file)) for file in files])


def run(command: list[Any], log: Path, step: str, threads: int | None, printed: Path | None = None) -> None:
    """Run a command with its output in `log` (stdout in `printed` if given). Raises Failure with the log's reason."""
    environment = dict(os.environ)
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("wb"))
        output = stack.enter_context(printed.open("wb")) if printed else errors
        found = subprocess.run(
            [str(part) for part in command], stdout=output, stderr=errors, env=environment, check=False
        )
    if found.returncode:
        raise Failure(step, f"{reason_of(log.read_text(errors='replace'))} (exit {found.returncode})")


@dataclass(frozen=True)
class Made:
    """A contestant's model. folder: what `ciuic eval` opens; stored: bytes of all its stored tensors; key: a digest of
    everything that the model depends on."""

    folder: Path
    stored: int
    key: str


class Workshop:
    """Makes contestants from one checkpoint and the same calibration tokens, below a folder of its own.

    tokens: int64 (sequences, length). calibration: the file that they were taken from; None: the package's own text.
    """

    def __init__(
        self,
        out: Path,
        model: Path,
        tokens: torch.Tensor,
        threads: int | None,
        calibration: Path | None = None,
    ) -> None:
        self.out, self.model, self.tokens, self.threads = out, model, tokens, threads
        self.calibration = calibration
        self.inputs = digest(
            files_digest(model, ("config.json", "*.safetensors")),
            hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        )
        self.folder = out / f"{model.name}-{self.inputs}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._not_installed: dict[str, Failure] = {}
        self._tokens_file = self.folder / "tokens.safetensors"
        save_file({"tokens": tokens.contiguous()}, self._tokens_file)

    def environment(self, tool: str) -> Path:
        """The Python of a peer's environment, which is made and filled on first use.

        Raises Failure("install"). A failed installation is not tried again by this object.
        """
        if tool in self._not_installed:
            raise self._not_installed[tool]
        try:
            return self._install(tool)
        except Failure as failure:
            self._not_installed[tool] = failure
            raise

    def _install(self, tool: str) -> Path:
        peer, folder = PEERS[tool], self.out / "peers" / tool
        python, stamp = folder / "bin" / "python", folder / "installed.json"
        wanted = json.dumps([peer.install, peer.build])
        if stamp.is_file() and stamp.read_text() == wanted:
            return python
        log = self.out / "peers" / f"{tool}.log"
        if not python.is_file():
            run([sys.executable, "-m", "venv", folder], log, "install", None)
        for arguments in peer.install:
            run([python, "-m", "pip", "install", "--quiet", *arguments], log, "install", None)
        if peer.build:
            run([python, SCRIPTS / peer.script, "--build"], log, "install", None)
        stamp.write_text(wanted)
        return python

    def make(self, contestant: Contestant) -> Made:
        """Make a contestant's model, or return the one made before from the same inputs. Raises Failure."""
        if "folder" in contestant.options:
            folder = Path(contestant.options["folder"])
            return Made(folder, tensor_bytes(folder), digest(files_digest(folder, ("*.safetensors",))))
        workdir = self.folder / contestant.slug
        key = digest(self.inputs, contestant.options, self._maker_digest(contestant.tool))
        done = workdir / "done.json"
        if done.is_file() and (found := json.loads(done.read_text()))["key"] == key:
            return Made(Path(found["folder"]), found["bytes"], key)
        begun = workdir / "begun.txt"
        if begun.is_file() and begun.read_text() != key:  # begun with other inputs: start anew
            shutil.rmtree(workdir)
        workdir.mkdir(exist_ok=True)
        begun.write_text(key)
        make = self._ours if contestant.tool == OURS else self._peer
        folder, stored = make(contestant, workdir)
        done.write_text(json.dumps({"key": key, "folder": str(folder), "bytes": stored}))
        return Made(folder, stored, key)

    @staticmethod
    def _maker_digest(tool: str) -> str:
        """A digest of the code that makes a tool's models: a change of it makes kept models stale."""
        if tool == OURS:
            return files_digest(Path(ciuic_cli.__file__).parent, ("*.py", "*.cpp", "*.h"))
        scripts = [(SCRIPTS / name).read_text() for name in (PEERS[tool].script, "job.py")]
        return digest(PEERS[tool].install, scripts)

    def _ours(self, contestant: Contestant, workdir: Path) -> tuple[Path, int]:
        out = workdir / "artifact"
        count, length = self.tokens.shape
        command = [sys.executable, VARIANT]
        for patch in contestant.options.get("patches", ()):
            command += ["--set", patch]
        command += ["--", "compress", self.model, out, "--target-bpw", contestant.options["bpw"]]
        command += ["--nsamples", count, "--seqlen", length, *contestant.options.get("arguments", ())]
        command += ["--calibration", self.calibration, "--calibration-only"] if self.calibration else []
        # No --force: an unfinished run of the same command continues where it stopped.
        if not out.is_dir():
            run(command, workdir / "log.txt", "quantize", self.threads)
        return out, tensor_bytes(out)

    def _peer(self, contestant: Contestant, workdir: Path) -> tuple[Path, int]:
        python = self.environment(contestant.tool)
        shared = self.folder / f"{contestant.tool}-shared"
        shared.mkdir(exist_ok=True)
        job = workdir / "job.json"
        folders = {"artifact": workdir / "artifact", "dense": workdir / "dense", "shared": shared}
        paths = {"model": self.model, "tokens": self._tokens_file, **folders}
        job.write_text(
            json.dumps(
                {name: str(path.resolve()) for name, path in paths.items()}
                | {"threads": self.threads or os.cpu_count() or 1, "options": contestant.options}
            )
        )
        script = SCRIPTS / PEERS[contestant.tool].script
        run([python, script, job], workdir / "log.txt", "quantize", self.threads)
        return folders["dense"], int(json.loads((workdir / "result.json").read_text())["bytes"])
