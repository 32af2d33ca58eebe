"""The wheel holds every file of the package, and works in an environment without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import ciuic_cli

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "samples" / "deepseek-v3-tiny"
LIBRARY = "ciuic_cli/libciuic_native.so"
AUTOLOAD = ("_ciuic_autoload.py", "ciuic_cli.pth", "ciuic_cli.start")
"""Files beside the package, in site-packages: artifacts load without `import ciuic_cli`."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in the build folder of `make .venv/.installed`, whose compiled files are taken again."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder))
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
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
        assert {name.split("/")[0] for name in opened.namelist()} == {"ciuic_cli", info, *AUTOLOAD}
        for name in AUTOLOAD:
            assert opened.read(name) == (ROOT / "autoload" / name).read_bytes()
        assert opened.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        entry_points = opened.read(f"{info}/entry_points.txt").decode().replace(" ", "")
        assert "ciuic=ciuic_cli.__main__:main" in entry_points
        assert "[vllm.general_plugins]\nciuic=ciuic_cli.serving.vllm:register" in entry_points
        metadata = Parser().parsestr(opened.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "ciuic-cli" and metadata["Version"] == version
    assert "-py3-none-" in wheel.name, "one wheel for every Python 3"


@dataclass(frozen=True)
class Environment:
    """A new environment that borrows the dependencies installed here; ciuic itself is installed into it."""

    home: Path

    @property
    def packages(self) -> Path:
        (found,) = self.home.glob("lib/python*/site-packages")
        return found

    def run(self, program: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment's bin folder, outside the repository; it must exit with 0."""
        ours = ("PYTHONPATH", "CIUIC_NATIVE_LIBRARY", "CIUIC_AUTOLOAD")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        done = subprocess.run(
            [str(self.home / "bin" / program), *map(str, arguments)],
            capture_output=True, text=True, check=False, cwd=self.home, env=environment | variables, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done


def new_environment(home: Path, *, with_pip: bool) -> Environment:
    venv.create(home, with_pip=with_pip)
    made = Environment(home)
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (made.packages / "borrowed.pth").write_text("\n".join(borrowed))
    return made


def environment_with(wheel: Path, home: Path) -> Environment:
    made = new_environment(home, with_pip=True)
    made.run("python", "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return environment_with(wheel, tmp_path_factory.mktemp("installed") / "environment")


@pytest.fixture(scope="module")
def compressed(installed: Environment) -> tuple[Path, dict[str, Any]]:
    """The sample's artifact, and the report that the command printed."""
    out = installed.home / "out"
    options = ("--effort", "fast", "--nsamples", "4", "--seqlen", "64")
    return out, json.loads(installed.run("ciuic", "compress", SAMPLE, out, *options, "--json").stdout)


def test_it_compresses_the_sample_without_the_repository(
    installed: Environment, compressed: tuple[Path, dict[str, Any]]
) -> None:
    out, report = compressed
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
    *places, model = installed.run("python", "-c", code).stdout.split()
    assert len(places) == 3 and all(place.startswith(str(installed.home)) for place in places), places
    assert model == "DeepseekV3ForCausalLM"


PIPELINE = """
import sys
from transformers import pipeline
assert "ciuic_cli" in sys.modules
found = pipeline("text-generation", sys.argv[1])("The island was", max_new_tokens=2, do_sample=False)
print(len(found[0]["generated_text"]) > len("The island was"))
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].self_attn.o_proj).__name__)
"""
"""A program that knows nothing of ciuic."""


def test_a_program_without_our_import_loads_the_artifact(
    installed: Environment, compressed: tuple[Path, dict[str, Any]]
) -> None:
    assert installed.run("python", "-c", PIPELINE, compressed[0]).stdout.split() == [
        "True",
        "CompressedLinear",
    ]
    quiet = installed.run("python", "-c", "import sys; print('ciuic_cli' in sys.modules)")
    assert quiet.stdout.strip() == "False" and quiet.stderr == ""
    off = "import transformers.quantizers.auto as auto; print('ciuic' in auto.AUTO_QUANTIZER_MAPPING)"
    assert installed.run("python", "-c", off, CIUIC_AUTOLOAD="0").stdout.strip() == "False"


def test_an_editable_install_loads_the_artifact_too(
    compressed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    editable = new_environment(tmp_path / "environment", with_pip=False)
    # By this Python's pip: with another Python, scikit-build-core would compile the library anew.
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", str(editable.packages))
    command = [sys.executable, "-m", "pip", "install", *options, "--editable", str(ROOT)]
    subprocess.run(command, check=True, timeout=600)
    assert editable.run("python", "-c", PIPELINE, compressed[0]).stdout.split() == [
        "True",
        "CompressedLinear",
    ]
    place = "import ciuic_cli; print(ciuic_cli.__file__)"
    assert editable.run("python", "-c", place).stdout.strip() == str(ROOT / "ciuic_cli" / "__init__.py")


def test_uninstalling_removes_every_file(wheel: Path, tmp_path: Path) -> None:
    environment = environment_with(wheel, tmp_path / "environment")
    environment.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "ciuic-cli")
    left = [str(path) for path in environment.packages.rglob("*ciuic*")]
    assert left == []
    assert environment.run("python", "-c", "pass").stderr == ""
