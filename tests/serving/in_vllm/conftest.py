"""Artifacts for vLLM, and the path to the benchmark whose functions these tests call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_checkpoints import make_checkpoint
from vllm_cases import Case, make_case

from ciuic_cli import compress

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))  # `vllm_agreement`


@pytest.fixture(scope="module")
def sample_for_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server-model")
    source = make_checkpoint("llama_tied", folder / "source", hidden_size=128)
    compress(source, folder / "out", effort="fast", nsamples=4, seqlen=64)
    return folder / "out"


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(family: str) -> Case:
        if family not in made:
            made[family] = make_case(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make
