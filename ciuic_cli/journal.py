"""The journal beside an output: what is finished, so that a killed run goes on and ends in the same bytes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from ciuic_cli.artifact.writer import CHECKSUMS, environment_fault, write_atomically
from ciuic_cli.digests import file_digest
from ciuic_cli.errors import EnvironmentFault, InputError

_FINGERPRINT = "fingerprint.json"
_PUBLISHED = "published"


class Journal:
    """The work folder of one output, locked for one process at a time (a context manager).

    Finished steps are files: each is written under another name, synced and renamed, so that a step is
    either done or not there; `digest` guards against a torn one.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.parent / f".{out.name}.ciuic"
        self._ended = out.parent / f".{out.name}.ciuic.ended"
        self._lock: int | None = None

    def __enter__(self) -> Journal:
        while self._lock is None:
            handle = self._open_lock()
            if self._is_current(handle):
                self._lock = handle
            else:  # another run ended and removed the folder in between
                os.close(handle)
        try:
            os.truncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.__exit__(None, None, None)
            raise environment_fault(error, self.folder) from error
        return self

    def _open_lock(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot make the work folder: {error.strerror}",
                file=self.folder,
                remedy="check the permissions of the output's parent folder",
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            raise EnvironmentFault(
                f"another run (PID {pid}) is writing this output",
                file=self.out,
                remedy="wait until it ends, or choose another output folder",
            ) from error
        return handle

    def _is_current(self, handle: int) -> bool:
        """Whether the locked file is still the one that others would find."""
        try:
            return os.fstat(handle).st_ino == (self.folder / "lock").stat().st_ino
        except FileNotFoundError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, fingerprint: dict[str, Any], *, restart: bool) -> bool:
        """Compare with the run that left this journal; True if there is one to go on from.

        Raises:
            InputError: the journal belongs to other inputs or options; the differences are listed.
        """
        path = self.folder / _FINGERPRINT
        found = self._json(path)
        if found is not None and found != fingerprint:
            if not restart:
                raise InputError(
                    "an unfinished run with other inputs or options lies beside this output: "
                    + "; ".join(_differences(found, fingerprint)),
                    file=self.folder,
                    remedy="repeat the earlier command to finish it, or start afresh with --force "
                    "(in Python: force=True)",
                )
            found = None
        if found is None:
            self.clear()  # whatever lies here is of another run, or of one that cannot be told
        write_atomically(path, json.dumps(fingerprint, indent=2, sort_keys=True).encode())
        return found is not None

    def clear(self) -> None:
        """Forget all steps; the lock stays."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def remove(self) -> None:
        """The run is over: nothing of it stays. It loses its name first: a kill leaves all of the journal or none."""
        self.sweep()
        try:
            self.folder.rename(self._ended)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.sweep()

    def sweep(self) -> None:
        """Remove what a run left that was killed in `remove`. Needs no lock: nobody goes on from there."""
        shutil.rmtree(self._ended, ignore_errors=True)

    def save(self, name: str, data: bytes) -> None:
        """Finish the step `name` with its result."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, hashlib.sha256(data).digest() + data)

    def publishing(self, folder: Path) -> None:
        """Note that the finished `folder` is about to take the output's name."""
        self.save(_PUBLISHED, (folder / CHECKSUMS).read_bytes())

    def published(self) -> bool:
        """Whether the output is what `publishing` announced: only this journal's removal was left to do."""
        announced = self.load(_PUBLISHED)
        try:
            return announced is not None and announced == (self.out / CHECKSUMS).read_bytes()
        except OSError:
            return False

    def seal(self, name: str, folder: Path) -> None:
        """Finish the step `name` whose result are the files of `folder`, a folder inside this one."""
        self.save(name, _digests(folder))

    def sealed(self, name: str, folder: Path) -> bool:
        """Whether the step `name` was finished and its files still have the bytes that they had then."""
        stored = self.load(name)
        return stored is not None and stored == _digests(folder)

    def load(self, name: str) -> bytes | None:
        """The result of a finished step; None if it is not there or torn."""
        try:
            stored = (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        digest, data = stored[:32], stored[32:]
        return data if hashlib.sha256(data).digest() == digest else None

    @staticmethod
    def _json(path: Path) -> dict[str, Any] | None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def _digests(folder: Path) -> bytes:
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_file():
            found[path.name] = file_digest(path)
    return json.dumps(found).encode()


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
            found.append(f"{key}: {', '.join(changed[:5])} changed")
        else:
            found.append(f"{key}: {before} before, {after} now")
    return found
