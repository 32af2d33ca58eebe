"""Two processes that share the layers of an artifact (pipeline parallelism) predict what transformers predicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_agreement import difference, in_transformers
from vllm_cases import AGREEMENT, Case, tokens

pytestmark = pytest.mark.campaign

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROGRAM = """
import json, sys
from pathlib import Path

import torch

folder, benchmarks, name, given = sys.argv[1:]
sys.path.append(benchmarks)
import vllm_agreement

given = json.loads(given)
tokens = torch.tensor(given.pop("tokens"))
found = getattr(vllm_agreement, name)(Path(folder), tokens, **given)
print("found", json.dumps([part.tolist() for part in (found if isinstance(found, tuple) else (found,))]))
"""


def in_two_processes(name: str, folder: Path, prompts: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """What the function `name` of benchmarks/vllm_agreement.py returns for two processes of vLLM.

    It runs in a program of its own, because vLLM reads its environment once.
    """
    cores = sorted(os.sched_getaffinity(0))
    # On a machine with one NUMA node vLLM does not divide the cores by itself.
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    settings = {"enforce_eager": False, "distributed_executor_backend": "mp", "pipeline_parallel_size": 2}
    given = json.dumps({"tokens": prompts.tolist()} | settings | options)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(BENCHMARKS), name, given],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    if done.returncode or not lines:
        raise RuntimeError((done.stdout + done.stderr)[-20000:])
    return [torch.tensor(part) for part in json.loads(lines[-1].removeprefix("found "))]


def test_a_prompt(case: Callable[[str], Case]) -> None:
    """Latent attention and experts in both processes; the first has the embedding, the second the head."""
    artifact = case("deepseek_v3").artifact
    (found,) = in_two_processes("in_vllm", artifact, tokens())
    assert torch.isfinite(found).all()
    assert difference(found, in_transformers(artifact, tokens())) < AGREEMENT


def test_single_tokens(case: Callable[[str], Case]) -> None:
    """A tied embedding, whose codes both processes hold."""
    artifact, prompts = case("llama_tied").artifact, tokens()[:, :32]
    ids, found = in_two_processes("generated_in_vllm", artifact, prompts, count=12)
    expected = in_transformers(artifact, torch.cat([prompts, ids], dim=1))[:, prompts.shape[1] - 1 :]
    assert difference(found, expected) < AGREEMENT


def test_it_is_refused_without_compilation(case: Callable[[str], Case]) -> None:
    """vLLM for CPUs would stop at an assertion when the first request arrives."""
    with pytest.raises(RuntimeError, match="remove --enforce-eager"):
        in_two_processes("in_vllm", case("llama_tied").artifact, tokens(), enforce_eager=True)
