"""The programs of llama.cpp that an export runs: its converter and its quantizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ciuic_cli.errors import EnvironmentFault, InputError
from ciuic_cli.export.gguf.types import LARGEST, GgufType

CONVERTER, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
_PLACES = ("", "build/bin", "bin", "build/bin/Release", "../build/bin", "../../build/bin")
"""Where a program may lie below (or, for builds of llama-cpp-python, beside) the folder that the user names."""
_LAST_LINES = 4
"""Lines of a failed program's output that the message shows (chosen)."""


@dataclass(frozen=True)
class LlamaCpp:
    """converter: convert_hf_to_gguf.py. quantizer: llama-quantize."""

    converter: Path
    quantizer: Path

    @cached_property
    def help(self) -> str:
        """The quantizer's help, which lists the types that this build knows."""
        # The program prints its help and exits with 1.
        done = subprocess.run([self.quantizer, "--help"], capture_output=True, text=True, check=False)
        if "--tensor-type-file" not in done.stdout + done.stderr:
            raise EnvironmentFault(
                "llama-quantize has no option --tensor-type-file",
                file=self.quantizer,
                remedy="install a newer llama.cpp",
            )
        return done.stdout + done.stderr

    def convert(self, checkpoint: Path, out: Path) -> None:
        """Write the checkpoint as a bfloat16 GGUF file. Raises InputError if the converter refuses it."""
        command: list[str | Path] = [
            sys.executable,
            self.converter,
            checkpoint,
            "--outfile",
            out,
            "--outtype",
            "bf16",
        ]
        done = _run(command)
        if done.returncode or not out.exists():
            raise InputError(
                f"llama.cpp's converter does not convert the checkpoint: {_end_of(done)}",
                file=checkpoint,
                remedy=f"see what `{self.converter.name} {checkpoint}` says; a newer llama.cpp may know the model, and "
                "pip install sentencepiece protobuf may be missing",
            )

    def quantize(
        self,
        source: Path,
        out: Path,
        types: Mapping[str, GgufType],
        importance: Path,
        work: Path,
        file_type: int,
    ) -> None:
        """Quantize each tensor to its type, and other matrices to 8 bits.

        Args:
            types: by GGUF name.
            importance: the file of `importance.write_importance`.
            work: folder for the list of types.
            file_type: value of `general.file_type`.
        """
        listed = work / "types.txt"
        escaped = {name.replace(".", "\\."): kind.name.lower() for name, kind in types.items()}
        listed.write_text("".join(f"^{name}$={kind}\n" for name, kind in escaped.items()))
        self._quantize(
            ["--pure", "--imatrix", importance, "--tensor-type-file", listed, "--override-kv",
             f"general.file_type=int:{file_type}", source, out, LARGEST.name], out,
        )  # fmt: skip

    def decode(self, source: Path, out: Path) -> None:
        """Write a quantized file with all its tensors in float32."""
        self._quantize(["--allow-requantize", "--pure", source, out, "F32"], out)

    def _quantize(self, arguments: Sequence[str | Path], out: Path) -> None:
        done = _run([self.quantizer, *arguments])
        if done.returncode or not out.exists():
            raise EnvironmentFault(
                f"llama-quantize failed: {_end_of(done)}",
                file=self.quantizer,
                remedy="check the free disk space beside the output, and whether a newer llama.cpp does it",
            )


def find_llama_cpp(folder: Path | None) -> LlamaCpp:
    """The programs in llama.cpp's folder, or without one on PATH.

    Raises EnvironmentFault if one of them is missing.
    """
    return LlamaCpp(_find(CONVERTER, folder), _find(QUANTIZER, folder))


def _find(program: str, folder: Path | None) -> Path:
    if folder is None:
        found = shutil.which(program) or _on_path(program)
        if found:
            return Path(found)
    else:
        for place in _PLACES:
            if (folder / place / program).is_file():
                return (folder / place / program).resolve()
    raise EnvironmentFault(
        f"{program} is not {'on PATH' if folder is None else 'in the folder'}",
        file=folder,
        remedy="give the folder of llama.cpp with --llama-cpp: its source, with the programs built in build/bin",
    )


def _on_path(program: str) -> str | None:
    """A file on PATH that need not be executable."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return next(
        (path for path in (os.path.join(item, program) for item in folders) if os.path.isfile(path)), None
    )


def _run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a program and keep its output; it has no input to wait for."""
    try:
        return subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
            errors="replace", check=False,
        )  # fmt: skip
    except OSError as error:
        raise EnvironmentFault(
            f"the program cannot be started: {error.strerror}",
            file=command[0],
            remedy="check its permissions and that it was built for this machine",
        ) from error


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return "; ".join(lines[-_LAST_LINES:]) or f"exit code {done.returncode}"
