"""Registration with transformers, before and after its import. Each case runs in its own process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM


def run(code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"CIUIC_AUTOLOAD": "0"}  # an installed package would register by itself
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = run(
        "import sys, ciuic_cli\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])\n"
        "from ciuic_cli.runtime.registration import install\n"
        "install(); install()\n"
        "print(sum(type(finder).__name__ == '_RegistryFinder' for finder in sys.meta_path))"
    )
    assert done.stdout.split("\n")[:2] == ["[]", "1"], done.stderr


def test_registered_when_transformers_comes_later() -> None:
    done = run(
        "import ciuic_cli\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING\n"
        "print(AUTO_QUANTIZER_MAPPING['ciuic'].__name__, AUTO_QUANTIZATION_CONFIG_MAPPING['ciuic'].__name__)"
    )
    assert done.stdout.strip() == "CiuicQuantizer CiuicConfig", done.stderr


def test_registered_when_transformers_is_there_already() -> None:
    done = run(
        "from transformers.quantizers import auto\n"
        "assert 'ciuic' not in auto.AUTO_QUANTIZER_MAPPING\n"
        "import ciuic_cli\n"
        "print(auto.AUTO_QUANTIZER_MAPPING['ciuic'].__name__)"
    )
    assert done.stdout.strip() == "CiuicQuantizer", done.stderr


def test_registered_when_the_plugin_comes_first(artifact: Callable[..., Any], tmp_path: Path) -> None:
    """Unpickling a loaded model's config imports the plug-in first (spawn, Ray, dask)."""
    config = AutoModelForCausalLM.from_pretrained(artifact("llama").folder).config
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(config))
    done = run(
        "import pathlib, pickle, sys\n"
        "config = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "from transformers.quantizers import auto\n"
        "print(type(config.quantization_config).__name__, auto.AUTO_QUANTIZER_MAPPING['ciuic'].__name__)",
        tmp_path / "config.pickle",
    )
    assert done.stdout.strip() == "CiuicConfig CiuicQuantizer", done.stderr


def test_loading_without_the_import_raises(artifact: Callable[..., Any]) -> None:
    """The blobs' shapes differ from those of the dense parameters, so transformers does not return random weights."""
    folders = [artifact(family).folder for family in ("llama_tied", "deepseek_v3")]
    done = run(
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n"
        "        AutoModelForCausalLM.from_pretrained(folder)\n"
        "    except RuntimeError as error:\n"
        "        print('raised', 'ignore_mismatched_sizes' in str(error))\n"
        "assert 'ciuic_cli' not in sys.modules",
        *folders,
    )
    assert done.stdout.split() == ["raised", "True"] * 2, done.stderr
    assert done.returncode == 0
    assert "mlp.experts.gate_up_proj" in done.stderr and "MISMATCH" in done.stderr
