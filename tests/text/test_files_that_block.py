"""Pipes and files of /proc are refused without waiting for somebody to write."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ciuic_cli.errors import InputError
from ciuic_cli.text.documents import read_text


def test_a_pipe_is_refused_at_once_even_if_it_replaces_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # The pipe took the place of a file after somebody looked at it.
    monkeypatch.setattr(Path, "stat", lambda path, **options: SimpleNamespace(st_mode=0o100644, st_size=9))
    refused = _within_seconds(lambda: read_text(pipe), unblock=pipe)
    assert refused is not None and "not a regular file" in refused.message


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_files_of_proc_are_not_read() -> None:
    """Some of them, such as /proc/kmsg, wait for events when they are read."""
    refused = _within_seconds(lambda: read_text(Path("/proc/self/status")))
    assert refused is not None and "empty" in refused.message


def _within_seconds(action: Callable[[], object], unblock: Path | None = None) -> InputError | None:
    """The InputError of the action; None if it succeeds or is not done after five seconds."""
    errors: list[InputError] = []

    def run() -> None:
        try:
            action()
        except InputError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    if thread.is_alive() and unblock is not None:
        os.close(os.open(unblock, os.O_WRONLY | os.O_NONBLOCK))
        return None
    return errors[0] if errors else None
