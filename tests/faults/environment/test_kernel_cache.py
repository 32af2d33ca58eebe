"""The kernel cache under concurrency: processes that share an empty folder, killed processes, damaged files."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from attacks import BASE_SEED, seeded

from ciuic_cli.kernels import compiler

ENTRY = ("transform", "sm_80")
PROCESSES = 4


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CIUIC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "meeting").mkdir()
    (tmp_path / "results").mkdir()
    return tmp_path / "cache" / "kernels"


def _compile(place: Path, together: int) -> None:
    """In a forked process: ask the cache for a kernel; before compiling, wait until `together` processes compile."""
    real, me = compiler.compile_kernel, str(os.getpid())

    def compile_kernel(*arguments: str) -> bytes:
        (place / "meeting" / me).touch()
        while len(list((place / "meeting").iterdir())) < together:
            time.sleep(0.01)
        return real(*arguments)

    compiler.compile_kernel = compile_kernel  # type: ignore[assignment]
    (place / "results" / me).write_bytes(compiler.cached_kernel(*ENTRY))


def start(cache: Path, together: int = 1) -> BaseProcess:
    process = get_context("fork").Process(target=_compile, args=(cache.parents[1], together))
    process.start()
    return process


def ends(cache: Path, process: BaseProcess) -> bytes:
    """Wait for the process; returns the machine code that the cache gave it."""
    process.join(300)
    assert process.exitcode == 0
    return (cache.parents[1] / "results" / str(process.pid)).read_bytes()


def only_entry(cache: Path) -> bytes:
    """The machine code in the only file of the cache. Fails if there is another entry or a temporary file."""
    (file,) = cache.iterdir()
    content = file.read_bytes()
    assert hashlib.sha256(content[32:]).digest() == content[:32]
    return content[32:]


def test_processes_that_compile_at_the_same_time_end_with_one_valid_file(cache: Path) -> None:
    found = {ends(cache, process) for process in [start(cache, PROCESSES) for _ in range(PROCESSES)]}
    assert len(list((cache.parents[1] / "meeting").iterdir())) == PROCESSES, "every process compiled"
    code = only_entry(cache)
    assert code[:4] == b"\x7fELF" and found == {code}
    assert ends(cache, start(cache)) == code
    assert len(list((cache.parents[1] / "meeting").iterdir())) == PROCESSES, "a cached kernel was compiled"


@seeded(1, campaign=4)
def test_killed_processes_leave_a_cache_that_works(cache: Path, seed: int) -> None:
    generator = random.Random(seed)
    started = time.monotonic()
    expected = ends(cache, start(cache))
    seconds = time.monotonic() - started
    for _ in range(3):
        for file in cache.iterdir():
            file.unlink()
        killed, other = start(cache), start(cache)
        time.sleep(seconds * generator.uniform(0.2, 1.5))
        killed.kill()
        killed.join()
        assert killed.exitcode in (0, -signal.SIGKILL)
        assert ends(cache, other) == ends(cache, start(cache)) == expected
    assert only_entry(cache) == expected


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Results of a fake compiler that replaces NVRTC: it returns at once, with other bytes each time."""
    made: list[bytes] = []

    def fake(*arguments: object) -> bytes:
        made.append(random.Random(len(made)).randbytes(100))
        return made[-1]

    monkeypatch.setattr(compiler, "compile_kernel", fake)
    return made


def test_a_file_torn_anywhere_or_with_any_byte_changed_is_compiled_anew(
    cache: Path, counted: list[bytes]
) -> None:
    compiler.cached_kernel(*ENTRY)
    (file,) = cache.iterdir()
    generator = random.Random(BASE_SEED)
    good = file.read_bytes()
    assert len(good) == 132
    torn = [good[:length] for length in range(len(good))]
    grown = [good + b"\0", b"\0" + good, bytes(len(good))]
    changed = [
        good[:at] + bytes([good[at] ^ generator.randrange(1, 256)]) + good[at + 1 :]
        for at in range(len(good))
    ]
    for number, damage in enumerate([*torn, *grown, *changed], start=1):
        file.write_bytes(damage)
        assert compiler.cached_kernel(*ENTRY) == counted[number] == only_entry(cache)
        assert compiler.cached_kernel(*ENTRY) == counted[number]
    assert len(counted) == 1 + 2 * 132 + 3


def test_an_interrupt_while_writing_leaves_nothing(
    cache: Path, counted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", interrupted)
        compiler.cached_kernel(*ENTRY)
    assert list(cache.iterdir()) == []
    assert compiler.cached_kernel(*ENTRY) == counted[1] == only_entry(cache)


def test_what_a_killed_process_left_is_removed_later(cache: Path, counted: list[bytes]) -> None:
    """Fresh temporary files stay: another process may be writing them."""
    compiler.cached_kernel(*ENTRY)
    (file,) = cache.iterdir()
    old, fresh, foreign = (cache / name for name in (f".{file.stem}-old", f".{file.stem}-new", "other"))
    for path in (old, fresh, foreign):
        path.write_bytes(b"half")
    for path in (old, foreign):
        os.utime(path, (time.time() - 7200,) * 2)
    file.write_bytes(b"damaged")
    compiler.cached_kernel(*ENTRY)
    assert sorted(cache.iterdir()) == sorted([file, fresh, foreign])
