"""What is wrong with the machine or its settings is said before any work, with exit code 5."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import Outcome, Victim, harmless, invoke, snapshot, spawn

import ciuic_cli
from ciuic_cli.codecs import native
from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.process import libraries
from ciuic_cli.process.libraries import SUPPORTED_TRANSFORMERS, import_fault, require_address_space
from ciuic_cli.process.memory import machine_fault

Make = Callable[..., Victim]


# --- transformers


def test_the_supported_range_of_transformers_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (stated,) = (line for line in project["dependencies"] if line.startswith("transformers"))
    assert re.fullmatch(r"transformers>=5\.19,<6", stated)
    assert SUPPORTED_TRANSFORMERS == ((5, 19), (6, 0))


@pytest.mark.parametrize("installed", ["4.57.1", "5.18.3", "6.0.0", "6.1.0.dev0", "unknown"])
@pytest.mark.parametrize("what", ["compress", "inspect", "eval", "bench"])
def test_another_transformers_is_named_with_the_supported_range(
    victim: Make, monkeypatch: pytest.MonkeyPatch, installed: str, what: str
) -> None:
    v = victim(0, "llama")
    monkeypatch.setattr(libraries, "version", lambda name: installed)
    done = v.compress() if what == "compress" else invoke(what, v.model)
    assert done.code == 5, done.stderr
    harmless(done)
    done.says(f"transformers {installed} is installed", "5.19 or newer, below 6.0")
    assert "transformers>=5.19,<6.0" in done.field("try")
    with pytest.raises(EnvironmentFault, match=re.escape(f"transformers {installed}")):
        ciuic_cli.compress  # noqa: B018


@pytest.mark.parametrize("installed", ["5.19.0", "5.19.0.dev0", "5.99"])
def test_every_supported_transformers_is_accepted(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(libraries, "version", lambda name: installed)
    libraries.require_supported_transformers()


@pytest.mark.slow
def test_from_pretrained_names_the_version_and_still_loads_other_models(victim: Make, artifact: Path) -> None:
    program = """
import sys, ciuic_cli.process.libraries as libraries
libraries.version = lambda name: "7.2"
import ciuic_cli
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[2])
except Exception as error:
    print(type(error).__name__, error.exit_code, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, victim(0, "llama").model, artifact],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    other, refused = done.stdout.splitlines()
    assert other == "LlamaForCausalLM"
    assert refused.startswith("EnvironmentFault 5 transformers 7.2 is installed; ciuic supports 5.19")


# --- the native library


@pytest.fixture
def no_native_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CIUIC_NATIVE_LIBRARY", str(tmp_path / "absent.so"))
    native.interface.cache_clear()
    yield
    native.interface.cache_clear()


@pytest.mark.parametrize("what", ["compress", "dry run", "eval", "bench"])
def test_a_missing_native_library_is_noticed_before_any_work(
    victim: Make, artifact: Path, no_native_library: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    v = victim(0, "llama")
    before = snapshot(v.folder)
    if what in ("compress", "dry run"):
        done = v.compress(*(["--dry-run"] if what == "dry run" else []))
    else:
        done = invoke(what, artifact, "--device", "cpu", *(["--limit", 1] if what == "eval" else []))
    assert done.code == 5, done.stderr
    harmless(done)
    done.says("native library", "is not installed")
    assert not re.search(r"forward|windows:|model:", done.stderr.replace("model: 0 %", ""))
    assert snapshot(v.folder) == before


def test_a_checkpoint_is_measured_without_the_native_library(victim: Make, no_native_library: None) -> None:
    assert invoke("eval", victim(0, "llama").model, "--limit", 1, "--seqlen", 64).code == 0


# --- environment variables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [("TORCH_LOGS", "garbage"), ("HF_HUB_DOWNLOAD_TIMEOUT", "soon"), ("HF_HUB_ETAG_TIMEOUT", "1s")],
)
def test_an_environment_variable_that_a_library_refuses_is_named(victim: Make, name: str, value: str) -> None:
    done = spawn("eval", victim(0, "llama").model, "--limit", 1, env={**os.environ, name: value})
    assert done.code == 5 and "Traceback" not in done.stderr, done.stderr
    assert name in done.field("error") and name in done.field("try")


def test_our_own_mistakes_stay_bugs() -> None:
    try:
        int("HF_HOME")
    except ValueError as error:
        assert import_fault(error) is None
    try:
        raise ModuleNotFoundError("No module named 'ciuic_cli.x'", name="ciuic_cli.x")
    except ModuleNotFoundError as error:
        assert import_fault(error) is None


# --- limits


def _limited(kind: int, limit: int, *arguments: object) -> Outcome:
    return spawn(*arguments, preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)))


@pytest.mark.parametrize("limit", [1 << 27, 1 << 28, 600 << 20, 1000 << 20])
def test_little_address_space_is_a_plain_message(artifact: Path, limit: int) -> None:
    done = _limited(resource.RLIMIT_AS, limit, "eval", artifact)
    assert done.code == 5 and "Traceback" not in done.stderr, done.stderr
    assert "address space is limited" in done.stderr and "ulimit -v" in done.stderr


@pytest.mark.parametrize("limit", [5, 8, 14])
def test_few_file_descriptors_are_a_plain_message(victim: Make, limit: int) -> None:
    """With 4, Python itself cannot start where .pth files import something."""
    v = victim(0, "llama")
    done = _limited(resource.RLIMIT_NOFILE, limit, *v.arguments())
    assert done.code in (0, 5) and "Traceback" not in done.stderr, done.stderr
    if done.code == 5:
        assert "ulimit -n" in done.stderr
    assert limit > 5 or done.code == 5


@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files", "/x"),
        ImportError("libtorch.so: cannot open shared object file: Too many open files"),
    ],
)
def test_messages_of_few_descriptors_are_recognised(error: Exception) -> None:
    fault = machine_fault(error)
    assert fault is not None and "ulimit -n" in (fault.remedy or "")


def test_no_limit_of_the_address_space_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (resource.RLIM_INFINITY, 1 << 31):
        values: Any = (limit, limit)
        monkeypatch.setattr(resource, "getrlimit", lambda kind, values=values: values)
        require_address_space()
