"""Programs that know nothing of ciuic answer from an artifact, in an environment where ciuic's wheel is installed.

    python benchmarks/unmodified_tools.py ENVIRONMENT ARTIFACT

ENVIRONMENT is the folder of a virtual environment with the wheel and `lm_eval[hf] transformers[serving]`. Shown are: a
text of `pipeline`, the score of `lm_eval --model hf` on a task of four questions, a chat with `transformers serve` over
HTTP, and how much later `python -c pass` ends because of the import finder. No option or import names ciuic.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PIPELINE = """
import sys
from transformers import pipeline
print(pipeline("text-generation", sys.argv[1])(sys.argv[2], max_new_tokens=12, do_sample=False)[0]["generated_text"])
"""
QUESTIONS = (
    ("The capital of France is", (" Paris", " cheese", " seven")),
    ("Two plus two is", (" blue", " four", " Berlin")),
    ("Fish live in the", (" water", " book", " noon")),
    ("At night it is", (" dark", " copper", " Tuesday")),
)
TASK = """task: four_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
SECONDS_TO_START = 300
"""Longest wait for the server (chosen)."""
START = "import os, sys; sys.path.append(sys.argv[1])"
"""What Python imports at its start anyway; `-S` leaves out .pth files, and this import."""
FINDER = f"{START}; import _ciuic_autoload; _ciuic_autoload.install()"
"""The same with what the wheel's .pth file does."""


class Environment:
    """A virtual environment whose programs run offline, outside any repository."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.programs, self.work = folder.resolve() / "bin", work
        (self.packages,) = folder.resolve().glob("lib/python*/site-packages")
        ours = ("PYTHONPATH", "CIUIC_AUTOLOAD", "CIUIC_NATIVE_LIBRARY")
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        self.variables = kept | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "datasets")}

    def run(self, program: str, *arguments: object) -> str:
        """Return what a program prints. If it fails, exit with its messages."""
        done = subprocess.run(
            [self.programs / program, *map(str, arguments)],
            cwd=self.work, env=self.variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{program} failed:\n{done.stderr[-3000:]}")
        return done.stdout

    @contextmanager
    def server(self, artifact: Path) -> Iterator[str]:
        """`transformers serve` with the artifact; gives its address."""
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        command = [
            self.programs / "transformers",
            "serve",
            str(artifact),
            "--port",
            str(port),
            "--device",
            "cpu",
        ]
        log = self.work / "server.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.work, env=self.variables, stdout=output, stderr=output
            )
        try:
            address, end = f"http://localhost:{port}", time.monotonic() + SECONDS_TO_START
            while not _answers(f"{address}/health"):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"transformers serve does not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5)
    except urllib.error.URLError:
        return False
    return True


def chat(address: str, artifact: Path, *questions: str) -> list[str]:
    """The answers to questions of one conversation."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body: dict[str, Any] = {
            "model": str(artifact),
            "messages": messages,
            "max_tokens": 16,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
    return [message["content"] for message in messages[1::2]]


def score(environment: Environment, artifact: Path) -> float:
    """Accuracy of `lm_eval --model hf` on the four questions."""
    data = environment.work / "questions.jsonl"
    rows = [
        {"question": question, "choices": sorted(choices), "answer": sorted(choices).index(choices[right])}
        for (question, choices), right in zip(QUESTIONS, (0, 1, 0, 0), strict=True)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (environment.work / "four_questions.yaml").write_text(TASK.format(data=data))
    printed = environment.run(
        "lm_eval", "--model", "hf", "--model_args", f"pretrained={artifact}", "--tasks", "four_questions",
        "--include_path", environment.work, "--device", "cpu", "--batch_size", 1,
    )  # fmt: skip
    match = re.search(r"\|acc\s*\|[^|]*\|\s*([\d.]+)\|", printed)
    if match is None:
        raise SystemExit(printed[-3000:])
    return float(match[1])


def start_up(environment: Environment, runs: int = 40) -> float:
    """Milliseconds by which the finder lengthens the start of Python: difference of medians of alternating runs."""
    seconds: dict[str, list[float]] = {START: [], FINDER: []}
    for _ in range(runs):
        for code, found in seconds.items():
            begin = time.perf_counter()
            environment.run("python", "-S", "-c", code, environment.packages)
            found.append(time.perf_counter() - begin)
    return 1000 * (statistics.median(seconds[FINDER]) - statistics.median(seconds[START]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", type=Path)
    parser.add_argument("artifact", type=Path)
    options = parser.parse_args()
    artifact = options.artifact.resolve()
    with tempfile.TemporaryDirectory() as work:
        environment = Environment(options.environment, Path(work))
        print(f"python -c pass: {start_up(environment):+.2f} ms", flush=True)
        text = environment.run("python", "-c", PIPELINE, artifact, "The capital of France is")
        print(f"pipeline: {text.strip()!r}", flush=True)
        print(f"lm_eval --model hf: accuracy {score(environment, artifact):.2f}", flush=True)
        with environment.server(artifact) as address:
            answers = chat(address, artifact, "What is the capital of France?", "And of Italy?")
        for answer in answers:
            print(f"transformers serve: {answer!r}")


if __name__ == "__main__":
    main()
