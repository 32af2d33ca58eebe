"""The wheel holds every file of the package, and works in an environment without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import ciuic_cli

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "samples" / "deepseek-v3-tiny"
LIBRARY = "ciuic_cli/libciuic_native.so"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder))
    command = [sys.executable, "-m", "pip", "wheel", *options, f"-Cbuild-dir={folder}/build", str(ROOT)]
    subprocess.run(command, check=True, timeout=600)
    (built,) = folder.glob("ciuic_cli-*.whl")
    return built


def package_files() -> dict[str, Path]:
    """What the wheel must hold, by the name in it: the package without C++ sources, and the CUDA sources."""
    package = ROOT / "ciuic_cli"
    found = {
        path.relative_to(ROOT).as_posix(): path
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".cpp", ".so")
    }
    kernels = [path for path in (ROOT / "cuda").iterdir() if path.suffix in (".cu", ".h")]
    return found | {f"ciuic_cli/cuda/{path.name}": path for path in kernels}


def test_its_files_are_those_of_the_tree(wheel: Path) -> None:
    expected = package_files()
    kinds = {Path(name).suffix for name in expected}
    assert kinds >= {".py", ".typed", ".h", ".cu", ".txt", ".json", ".jinja", ".css"}
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if name.startswith("ciuic_cli/")}
        assert names - expected.keys() == {LIBRARY}
        assert expected.keys() - names == set(), "missing from the wheel"
        for name, path in expected.items():
            assert opened.read(name) == path.read_bytes(), name
        assert opened.read(LIBRARY)[:4] == b"\x7fELF"


def test_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        version = ciuic_cli.__version__
        info = f"ciuic_cli-{version}.dist-info"
        assert {name.split("/")[0] for name in opened.namelist()} == {"ciuic_cli", info}
        assert opened.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "ciuic=ciuic_cli.__main__:main" in opened.read(f"{info}/entry_points.txt").decode().replace(
            " ", ""
        )
        metadata = Parser().parsestr(opened.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "ciuic-cli" and metadata["Version"] == version
    assert "-py3-none-" in wheel.name, "one wheel for every Python 3"


def test_it_compresses_the_sample_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """The new environment borrows the dependencies that are installed here; ciuic itself comes from the wheel."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True, timeout=300)
    (packages,) = home.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    ours = ("PYTHONPATH", "CIUIC_NATIVE_LIBRARY")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    out = tmp_path / "out"

    def run(*command: object) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True, text=True, check=False, cwd=tmp_path, env=environment, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    options = ("--effort", "fast", "--nsamples", "4", "--seqlen", "64")
    report = json.loads(run(home / "bin" / "ciuic", "compress", SAMPLE, out, *options, "--json"))
    assert report["ratio"] >= 4.0
    code = f"""
import ciuic_cli
from ciuic_cli.codecs.native import interface
from ciuic_cli.kernels import sources
from ciuic_cli.text.documents import builtin_evaluation_text
for unit in sources.UNITS:
    assert sources.source(unit) and sources.headers()
assert builtin_evaluation_text()
for place in (ciuic_cli.__file__, interface()._name, sources.folder()):
    print(place)
print(type(ciuic_cli.load({str(out)!r})).__name__)
"""
    *places, model = run(python, "-c", code).split()
    assert len(places) == 3 and all(place.startswith(str(home)) for place in places), places
    assert model == "DeepseekV3ForCausalLM"
