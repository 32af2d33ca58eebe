"""The process of a command: imports, streams and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ciuic_cli import __version__
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.exit_codes import run
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import WorkerFault
from ciuic_cli.process.signals import INTERRUPTED


@pytest.fixture(scope="module")
def artifact(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    compress(
        tiny_checkpoint("llama"),
        out,
        ratio=3,
        calibration=text,
        calibration_only=True,
        nsamples=4,
        seqlen=64,
        effort="fast",
    )
    return out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, f"ciuic {__version__}"),
        (["--help"], 0, "compress"),
        (["compress", "./nowhere", "out"], 3, "no such folder"),
        (["inspect", "./nowhere"], 3, "no such folder"),
        (["eval", "./nowhere"], 3, "no such folder"),
        (["bench", "./nowhere"], 3, "no such folder"),
    ],
)
def test_commands_without_a_model_import_nothing_heavy(arguments: list[str], code: int, said: str) -> None:
    script = (
        "import sys\nfrom ciuic_cli.cli import app as cli\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    code = end.code or 0\n"
        "heavy = {'torch', 'transformers', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\nsys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "chosen", "sleep"),
    [
        ("compress", {}, True),
        ("eval", {"OMP_WAIT_POLICY": "active"}, False),
        ("bench", {}, False),
    ],
)
def test_idle_threads_sleep_except_in_bench(
    artifact: Path, text: Path, tmp_path: Path, command: str, chosen: dict[str, str], sleep: bool
) -> None:
    """libgomp reports how often an idle thread looks for work before it sleeps: GOMP_SPINCOUNT."""
    arguments = {
        "compress": [str(artifact), str(tmp_path / "out"), "--calibration", str(text), "--calibration-only"],
        "eval": [str(artifact), "--text", str(text), "--seqlen", "64", "--limit", "1"],
        "bench": [str(artifact), "-p", "4", "-n", "2", "-r", "1"],
    }[command]
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-m", "ciuic_cli", command, *arguments, "--device", "cpu"],
        env={**usual, "OMP_DISPLAY_ENV": "verbose", **chosen}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.findall(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
    assert found, done.stderr
    assert all((spins == "0") is sleep for spins in found), found


def test_stdout_closed_before_the_result(artifact: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "ciuic_cli", "inspect", str(artifact), "--json"],
        stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("ciuic --version > /dev/full", 5, "No space left"),
        ("ciuic --help > /dev/full", 5, "No space left"),
        ("ciuic compress --help > /dev/full", 5, "No space left"),
        ("(ciuic --version; echo $? >&2) | true", 0, "closed early"),
        ("(ciuic compress --help; echo $? >&2) | true", 0, "closed early"),
        ("ciuic --help >&-", 0, ""),
        ("ciuic inspect ./nowhere 2> /dev/full", 3, ""),
        ("ciuic inspect ./nowhere 2>&-", 3, ""),
        ("ciuic inspect ./nowhere <&- >&- 2>&-", 3, ""),
        ("(ciuic inspect ./nowhere 2>&1; exit $?) | true; exit ${PIPESTATUS[0]}", 3, ""),
        ("ciuic inspect --nothing 2> /dev/full", 2, ""),
        ("ciuic inspect ./nowhere", 3, "no such folder"),
    ],
)
def test_streams_that_are_full_or_closed(command: str, code: int, said: str) -> None:
    script = f'ciuic() {{ "{sys.executable}" -m ciuic_cli "$@"; }}; {command}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_prints_of_libraries_go_to_stderr(artifact: Path) -> None:
    script = (
        "import os, sys\nfrom ciuic_cli.report import inspection\nfrom ciuic_cli.__main__ import main\n"
        "describe = inspection.describe\n"
        "inspection.describe = lambda path: (os.write(1, b'native'), print('chats'), describe(path))[-1]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", str(artifact), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "artifact"
    assert "native" in done.stderr and "chats" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["typer", "rich.table", "torch"])
def test_interrupted_during_an_import(number: signal.Signals, module: str) -> None:
    """The console script of pyproject.toml ends tidily if a signal arrives during any import."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    home, function = project["project"]["scripts"]["ciuic"].split(":")
    script = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {module!r}:\n            signal.raise_signal({int(number)})\n"
        "sys.meta_path.insert(0, Finder)\n"
        f"from {home} import {function}\n{function}()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, "inspect", "."], capture_output=True, text=True)
    assert done.returncode == INTERRUPTED
    assert done.stderr == "interrupted\n" and done.stdout == ""


def test_the_signal_of_torchrun_does_not_hide_the_worker_that_ended(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """After a worker has ended, torchrun signals the others: the first cause is what they report."""

    def action() -> None:
        try:
            raise WorkerFault("another worker of this run has stopped: rank 1")
        finally:
            signal.raise_signal(signal.SIGTERM)  # arrives while the error propagates

    assert run(Console(), action) == 5
    assert "rank 1" in capfd.readouterr().err

    def stop() -> None:
        signal.raise_signal(signal.SIGTERM)

    assert run(Console(), stop) == INTERRUPTED


def test_warnings_of_torchao_are_hidden_and_nothing_else(tmp_path: Path) -> None:
    """transformers imports torchao wherever it is installed, so its warnings would appear with every command."""
    package = tmp_path / "torchao"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import logging\nfor name in (__name__, 'another'):\n"
        "    logging.getLogger(name).warning('warning of %s', name)\n"
        "    logging.getLogger(name).error('error of %s', name)\n"
    )
    script = "from ciuic_cli.__main__ import _command_line\n_command_line()\nimport torchao"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    lines = done.stderr.splitlines()
    assert lines == ["error of torchao", "warning of another", "error of another"]
