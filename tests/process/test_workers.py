"""Several workers on one run: the same bytes as with one, and no lost steps when one of them ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from short_best import SHORT
from threaded_workers import Meeting, Threads

from ciuic_cli.compression import options
from ciuic_cli.compression.pipeline import compress
from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.process.workers import Workers, is_distributed, is_leader, join_workers
from ciuic_cli.statistics.moments import Moments
from ciuic_cli.statistics.sums import SEGMENTS, OrderedSums, segments_of, share_of

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"ratio": 3.0, "nsamples": 20, "seqlen": 48, "effort": "fast"}


NAMES = ["a", "b", "stack"]


def _segment(number: int) -> dict[Key, Moments]:
    """Moments of one segment of the text. Not every expert gets a token in every segment."""
    generator = torch.Generator().manual_seed(number)
    keys: list[Key] = [("a", None), ("b", None), ("stack", number % 3), ("stack", 3)]
    return {
        key: Moments(
            torch.randn(5, 5, generator=generator),
            torch.randn(3, generator=generator),
            float(torch.rand(1, generator=generator)),
            number + 1,
            torch.rand(number + 1, generator=generator),
        )
        for key in keys
    }


@pytest.mark.parametrize("chunks", [1, 3, 8, 15])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 11])
def test_sums_have_the_bits_of_sequential_sums(chunks: int, size: int) -> None:
    segments = segments_of(chunks)
    assert [chunk for segment in segments for chunk in segment] == list(range(chunks))
    assert 0 < len(segments) <= SEGMENTS and all(segments)
    lengths = [len(segment) for segment in segments]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    expected: dict[Key, Moments] = {}
    for segment in segments:
        for key, found in _segment(segment.start).items():
            if key in expected:
                expected[key].include(found)
            else:
                expected[key] = found
    meeting = Meeting(size)

    def work(rank: int) -> dict[Key, Moments]:
        workers = Threads(rank, size, meeting)
        sums = OrderedSums(workers, NAMES, CPU)
        for segment in share_of(segments, workers):
            sums.add(_segment(segment.start) if segment else {})
        return sums.totals

    with ThreadPoolExecutor(size) as pool:
        parts = list(pool.map(work, range(size)))
    totals = {key: found for part in parts for key, found in part.items()}
    assert totals.keys() == expected.keys() and sum(map(len, parts)) == len(expected)
    for key, found in expected.items():
        assert torch.equal(totals[key].inputs, found.inputs), key
        assert torch.equal(totals[key].outputs, found.outputs), key
        assert torch.equal(totals[key].roots, found.roots), key
        assert (totals[key].trace, totals[key].tokens) == (found.trace, found.tokens)


def test_every_item_is_taken_once() -> None:
    store = dist.HashStore()  # type: ignore[no-untyped-call]
    items = list(range(100, 160))

    def work(rank: int) -> list[int]:
        found = []
        for item in Workers(rank, 3, store).take("things", items):
            time.sleep(0.001)
            found.append(item)
        return found

    with ThreadPoolExecutor(3) as pool:
        taken = list(pool.map(work, range(3)))
    assert Counter(item for part in taken for item in part) == Counter(items)
    assert all(taken), "one worker took every item"
    assert list(Workers().take("things", items)) == items


def _torchrun(
    size: int, model: Path, out: Path, text: Path, *more: str, **chosen: Any
) -> subprocess.Popen[str]:
    given = {name: chosen.pop(name, value) for name, value in SETTINGS.items()}
    program = (
        ["-m", "ciuic_cli"] if given["effort"] == "fast" else [str(Path(__file__).with_name("short_best.py"))]
    )
    words = [f"--{name}={value}" for name, value in given.items()]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)),
        *program,
        *("compress", str(model), str(out), "--calibration", str(text), "--calibration-only"),
    ]
    return subprocess.Popen(
        [*command, *words, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **chosen
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "WORLD_SIZE to a number; it is ''"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE to a number; it is 'many'"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK to a number; it is '-1'"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "cannot connect.*MASTER_ADDR"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"},
            "cannot connect.*'x'",
        ),
    ],
)
def test_incomplete_settings_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "run", **settings}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentFault, match=message) as caught:
        if not is_leader() or not is_distributed():
            return
        with join_workers():
            pass
    assert "torchrun" in str(caught.value.remedy)


_JOINING = """
from ciuic_cli.process.signals import interruptible
from ciuic_cli.process.workers import join_workers
print("joining", flush=True)
with interruptible(), join_workers():
    pass
"""


def test_a_worker_that_waits_for_a_leader_that_does_not_come_ends_by_sigterm() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    settings |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "run"}
    settings |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    worker = subprocess.Popen(
        [sys.executable, "-c", _JOINING],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"joining\n"
        time.sleep(2)  # now it waits for the other's address
        assert worker.poll() is None
        worker.terminate()
        said = worker.communicate(timeout=10)[1]
        assert b"KeyboardInterrupt" in said and worker.returncode == -signal.SIGINT, said.decode()
    finally:
        worker.kill()
        worker.wait()


def test_an_ended_worker_is_named() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    workers, here = Workers(0, 2), socket.gethostname()
    workers._processes = [(here, os.getpid()), (here, other.pid)]
    assert workers.fault(0.0) is None
    other.kill()  # not waited for: it stays as a zombie, as torchrun's workers do for a moment
    fault = workers.fault(5.0)
    assert fault is not None and fault.message.endswith(f": rank 1 (process {other.pid})")
    other.communicate()
    assert workers.fault(0.0) is not None, "it is gone"
    workers._processes[1] = ("another machine", other.pid)
    assert workers.fault(0.0) is None, "only this machine's processes are known"


def _weights(out: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(out.glob("*.safetensors")))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 60)
    return path


@pytest.fixture(scope="module")
def alone(
    tiny_checkpoint: Callable[..., Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], bytes]:
    """`alone(family, effort)`: the weights of a run with one worker."""
    made: dict[tuple[str, str], bytes] = {}

    def make(family: str, effort: str) -> bytes:
        if (family, effort) not in made:
            out = tmp_path_factory.mktemp("alone") / "out"
            settings = {**SETTINGS, "effort": effort}
            compress(tiny_checkpoint(family), out, calibration=[text], calibration_only=True, **settings)
            made[family, effort] = _weights(out)
        return made[family, effort]

    return make


@pytest.mark.parametrize(
    ("family", "size", "effort"), [("deepseek_v3", 3, "fast"), ("llama_tied", 2, "best")]
)
def test_any_number_of_workers_gives_the_same_bytes(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    alone: Callable[[str, str], bytes],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    size: int,
    effort: str,
) -> None:
    monkeypatch.setitem(options.EFFORTS, "best", SHORT)
    run = _torchrun(size, tiny_checkpoint(family), tmp_path / "several", text, effort=effort)
    stdout, stderr = run.communicate(timeout=240)
    assert run.returncode == 0, stderr
    assert stdout.count("KL divergence") == 1, "more than one worker prints"
    assert [path.name for path in tmp_path.iterdir()] == ["several"]
    assert _weights(tmp_path / "several") == alone(family, effort)


def test_a_dry_run_with_several_workers_writes_nothing(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    run = _torchrun(2, tiny_checkpoint("llama_tied"), tmp_path / "out", text, "--dry-run")
    stdout, stderr = run.communicate(timeout=240)
    assert run.returncode == 0 and stdout.count("KL divergence") == 1, stderr
    assert not list(tmp_path.iterdir())


def test_a_refused_output_ends_all_workers_and_stays(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    run = _torchrun(2, tiny_checkpoint("llama_tied"), out, text)
    _, stderr = run.communicate(timeout=240)
    assert run.returncode != 0
    assert stderr.count("the output exists already") == 1
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _worker(run: subprocess.Popen[str], rank: int) -> int:
    """The process id of one of torchrun's workers."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            settings = entry.joinpath("environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended
            continue
        if int(parent) == run.pid and f"RANK={rank}".encode() in settings:
            return int(entry.name)
    raise AssertionError(f"no worker {rank}")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers in /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_killed_worker_another_run_continues(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    alone: Callable[[str, str], bytes],
    rank: int,
) -> None:
    model, out = tiny_checkpoint("deepseek_v3"), tmp_path / "out"
    run = _torchrun(2, model, out, text)
    arms = tmp_path / ".out.ciuic" / "arms"
    while not arms.is_dir() or len(list(arms.iterdir())) < 5:
        assert run.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    os.kill(_worker(run, rank), signal.SIGKILL)
    assert run.wait(timeout=120) != 0
    assert not out.exists()
    hints: list[str] = []
    compress(model, out, calibration=[text], calibration_only=True, hint=hints.append, **SETTINGS)
    assert any("continuing the unfinished run" in line for line in hints)
    assert _weights(out) == alone("deepseek_v3", "fast")
