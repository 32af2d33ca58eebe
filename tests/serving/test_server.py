"""`ciuic serve` in a process of its own, without network access but to this machine: chats over HTTP, and refusals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ciuic_cli.cli.app import app
from ciuic_cli.serving import server
from ciuic_cli.serving.text_model import Sampling, TextModel

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


class Client:
    """A client of the served model."""

    def __init__(self, port: int) -> None:
        self.base = f"http://localhost:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.base + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and body of the answer."""
        request = urllib.request.Request(
            self.base + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "ciuic_cli",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            client = Client(port)
            for _ in range(600):
                try:
                    assert client.get("/health") == {"status": "ok"}
                    break
                except urllib.error.URLError:
                    assert process.poll() is None, process.stderr and process.stderr.read()
                    time.sleep(0.1)
            yield client, process
        finally:
            process.kill()


def _streamed(body: str) -> str:
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 3
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_a_scripted_chat(chatting: Path) -> None:
    """The answers are those of `ciuic chat`, streamed and at once, also after a first answer."""
    model = TextModel(chatting, "cpu", chat=True)
    messages = [{"role": "user", "content": "Hello"}]
    options = {"temperature": 0, "max_tokens": 8}
    with served(chatting, "--default-seed", "1") as (client, process):
        for message in ("Who are you?", None):
            expected = model.reply(messages, Sampling(8, temperature=0), lambda part: None).text
            status, body = client.post("/v1/chat/completions", messages=messages, **options)
            assert status == 200, body
            assert json.loads(body)["choices"][0]["message"]["content"] == expected
            status, body = client.post("/v1/chat/completions", messages=messages, stream=True, **options)
            assert status == 200 and _streamed(body) == expected
            messages += [{"role": "assistant", "content": expected}, {"role": "user", "content": message}]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


def test_a_model_without_a_template_completes_and_refuses_chats(sample: Path) -> None:
    with served(sample) as (client, process):
        messages = [{"role": "user", "content": "Hello"}]
        status, body = client.post("/v1/chat/completions", messages=messages)
        assert status == 400 and "no chat template" in json.loads(body)["error"]["message"]
        status, body = client.post("/v1/completions", prompt="The island was", temperature=0, max_tokens=4)
        assert status == 200 and json.loads(body)["choices"][0]["text"]
        process.kill()
        assert process.stderr is not None
        remarks = process.stderr.read()
        assert "no chat template" in remarks and f"serving {sample} at {client.base}/v1" in remarks


def test_options_and_libraries_are_checked_first(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["serve", str(sample), "--no-such-option"])
    assert done.exit_code == 2 and "--no-such-option" in done.stderr
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["serve", str(sample)])
    assert done.exit_code == 5 and "ciuic-cli[serve]" in done.stderr


def test_a_port_in_use_is_a_fault_of_the_machine(sample: Path) -> None:
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", str(sample), "--port", port, "--host", "127.0.0.1"])
    assert done.exit_code == 5 and port in done.stderr and "--port" in done.stderr
    assert "serving" not in done.stderr
