"""vLLM's OpenAI server answers from an artifact over HTTP, as users start it: no option names ciuic."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.campaign
SECONDS_TO_START = 900
"""vLLM imports for a minute in each of three processes, and compiles the model."""


@pytest.fixture(scope="module")
def server(sample_for_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(sample_for_vllm)]
    options = ["--port", str(port), "--host", "127.0.0.1", "--max-model-len", "128", "--max-num-seqs", "2"]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # as a user starts it
    with log.open("w") as output:
        process = subprocess.Popen([*command, *options], stdout=output, stderr=output, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])


def _post(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_it_completes_a_text(server: str, sample_for_vllm: Path) -> None:
    body = {
        "model": str(sample_for_vllm),
        "prompt": "The river",
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 1,
    }
    answer = _post(f"{server}/v1/completions", **body)
    assert answer["usage"]["completion_tokens"] == 8
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert len(logprobs) == 8 and all(math.isfinite(value) and value <= 0 for value in logprobs)
    assert answer["choices"][0]["text"] == _post(f"{server}/v1/completions", **body)["choices"][0]["text"]
