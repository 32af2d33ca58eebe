"""Runs of the `ciuic` command as forks of this process, which are killed at a time or at a write access.

The process has imported everything before, so that a run takes about a second.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.cli import app as cli
from ciuic_cli.process.threads import renew_pool

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
"""What kills a run, each equally often."""
INTERRUPTED = 130
"""Exit code of an interrupted run."""
_WRITE_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


torch.set_num_threads(1)  # other threads of this process would not survive a fork


class ForkedRuns:
    """Forks that run one command.

    Args:
        folder: for what the runs say, and for their temporary files.
        place: the folder of the output, in which accesses are counted.
        command: the arguments of `ciuic`.
    """

    def __init__(self, folder: Path, place: Path, command: list[str]) -> None:
        self.folder, self.place, self.command = folder, place, command
        self.temporary = folder / "temporary"
        self.temporary.mkdir()

    def start(
        self,
        *options: str,
        kill_at: int = 0,
        count_in: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> int:
        """Fork a run and return its PID.

        kill_at: the run kills itself at this write access to the output's folder; 0: never.
        count_in: file to which the run writes the number of its accesses.
        """
        pid = os.fork()
        if pid:
            return pid
        code = 99
        try:
            os.environ.update(environment or {})
            renew_pool()
            self._prepare(kill_at, count_in)
            sys.argv = ["ciuic", *self.command, *options]
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 98
        except KeyboardInterrupt:  # the signal came before the command began or after it ended
            code = INTERRUPTED
        finally:
            sys.stderr.flush()
            if count_in is not None:
                count_in.write_text(str(self.accessed))
            os._exit(code)

    def _prepare(self, kill_at: int, count_in: Path | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        said = os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        tempfile.tempdir = str(self.temporary)
        self.accessed = 0
        place = str(self.place)

        def count_access(event: str, arguments: tuple[Any, ...]) -> None:
            writes = (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if (writes or event in _WRITE_EVENTS) and _path(event, arguments).startswith(place):
                self.accessed += 1
                if self.accessed == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        if kill_at or count_in is not None:
            sys.addaudithook(count_access)

    @staticmethod
    def wait(pid: int) -> int:
        """Exit code of a run; negative: the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def check_end(self, number: int, code: int) -> None:
        """Of a run that the signal `number` killed: a signal that can be handled leaves no traceback and no pieces."""
        if number == signal.SIGKILL:
            return
        assert code in (0, INTERRUPTED, -number), f"exit {code}: {self.said()}"
        assert "Traceback" not in self.said(), self.said()
        pieces = [p.name for p in self.place.rglob("*") if p.name.endswith((".part", ".partial"))]
        assert not pieces, f"not tidied up after {number}: {pieces}"
        temporary = [path.name for path in self.temporary.iterdir()]
        assert not temporary, f"temporary files after {number}, exit {code}: {temporary}; {self.said()}"


def _path(event: str, arguments: tuple[Any, ...]) -> str:
    """The path of an audited call. shutil.rmtree removes names relative to folders that it has open."""
    path = os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else ""
    if event in ("os.remove", "os.rmdir") and arguments[1] != -1:
        path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), path)
    return path
