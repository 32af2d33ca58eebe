"""An artifact for vLLM's server, and vLLM's settings for a small machine without a network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_checkpoints import make_checkpoint

from ciuic_cli import compress

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine runs in the test's process


@pytest.fixture(scope="module")
def sample_for_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server-model")
    source = make_checkpoint("llama_tied", folder / "source", hidden_size=128)
    compress(source, folder / "out", effort="fast", nsamples=4, seqlen=64)
    return folder / "out"
