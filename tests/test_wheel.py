"""The wheel holds all that a user needs, and works in an environment without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "samples" / "deepseek-v3-tiny"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
    ]
    subprocess.run([*map(str, command), f"-Cbuild-dir={folder}/build", str(ROOT)], check=True, timeout=600)
    (found,) = folder.glob("ciuic_cli-*.whl")
    return found


@pytest.mark.slow
def test_its_files(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = (
        "py.typed",
        "cuda/linear.cu",
        "cuda/device.h",
        "native/trellis_decode.h",
        "text/data/calibration.txt",
        "text/data/LICENSES.txt",
        "report/memory_report.schema.json",
        "report/templates/page.html.jinja",
        "report/templates/style.css",
        "libciuic_native.so",
    )
    assert {f"ciuic_cli/{name}" for name in wanted} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith(".cpp") or name.startswith(("tests/", "benchmarks/"))]


@pytest.mark.slow
def test_it_compresses_the_sample_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """The new environment borrows the dependencies that are installed here; ciuic itself comes from the wheel."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True, timeout=300)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = tmp_path / "out"
    command = [
        home / "bin" / "ciuic",
        "compress",
        SAMPLE,
        out,
        "--effort",
        "fast",
        "--nsamples",
        "4",
        "--seqlen",
        "64",
    ]
    done = subprocess.run(
        [*map(str, command), "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ratio"] >= 4.0
    code = f"import ciuic_cli; print(ciuic_cli.__file__); print(type(ciuic_cli.load({str(out)!r})).__name__)"
    loaded = subprocess.run(
        [python, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=300,
    )
    place, model = loaded.stdout.split()
    assert place.startswith(str(home)) and model == "DeepseekV3ForCausalLM"
