"""Kills ranks of `ciuic train --fsdp`: `python tests/faults/campaigns/killing_shards.py MODEL --kills 20`.

One of two ranks, or both, are killed at a random moment, or at their n-th write access to the folder of the output. As
torchrun does, this program then ends the other rank by SIGTERM. There must be no output, or the finished one. The same
command must then end with the same bytes as an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch.distributed as dist
from forked_runs import ForkedRuns

from ciuic_cli.train.sharding import run as sharded_run

OPTIONS = (
    *("--fsdp", "--sequence-len", "64", "--max-steps", "8", "--learning-rate", "5e-3", "--save-steps", "2"),
    *("--no-sample-packing", "--device", "cpu"),
)
SIZE = 2
POLL = 0.1
"""Seconds after which torchrun notices that a rank has ended (its default)."""
PATIENCE = 30.0
"""Seconds after SIGTERM until a rank that still runs has failed this test; torchrun kills it then."""


class Harness:
    """One model and its data, the output of an undisturbed run, and counts of outcomes."""

    def __init__(self, model: Path, folder: Path, method: str, seed: int) -> None:
        assert sharded_run  # imported before the forks, which inherit it
        self.random, self.counts = random.Random(seed), Counter[str]()
        data = folder / "train.jsonl"
        lines = [{"text": f"The number after {n} is {n + 1}."} for n in range(1, 20)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.place = folder / "place"
        self.place.mkdir()
        self.out = self.place / "out"
        command = [
            "train",
            str(model),
            str(self.out),
            "--train-file",
            str(data),
            "--method",
            method,
            *OPTIONS,
        ]
        self.ranks = []
        for rank in range(SIZE):
            (folder / str(rank)).mkdir()
            self.ranks.append(ForkedRuns(folder / str(rank), self.place, command))
        logs, began = [folder / f"accesses{rank}" for rank in range(SIZE)], time.monotonic()
        assert self._wait(self._start(count_in=logs)) == [0, 0], self._said()
        self.seconds = time.monotonic() - began
        self.accesses = [int(log.read_text()) for log in logs]
        self.expected = self._bytes()
        shutil.rmtree(self.place)

    def _start(self, kill_at: list[int] | None = None, count_in: list[Path] | None = None) -> list[int]:
        # As in torchrun, the store in which the ranks meet outlives them.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "WORLD_SIZE": str(SIZE),
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return [
            forked.start(
                kill_at=0 if kill_at is None else kill_at[rank],
                count_in=None if count_in is None else count_in[rank],
                environment={
                    **shared,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "TORCHELASTIC_RUN_ID": "run",
                },
            )
            for rank, forked in enumerate(self.ranks)
        ]

    def _wait(self, pids: list[int]) -> list[int]:
        """The exit codes, after what torchrun does: when a rank has failed, the others get SIGTERM."""
        codes: dict[int, int] = {}
        told = 0.0
        while len(codes) < len(pids):
            time.sleep(POLL)
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            if not told and any(codes.values()):
                told = time.monotonic()
                for rank, pid in enumerate(pids):
                    if rank not in codes:
                        os.kill(pid, signal.SIGTERM)
            if told and time.monotonic() - told > PATIENCE:
                left = [rank for rank in range(SIZE) if rank not in codes]
                for rank in left:
                    os.kill(pids[rank], signal.SIGKILL)
                raise AssertionError(f"ranks {left} did not end: {self._said()}")
        return [codes[rank] for rank in range(SIZE)]

    def _said(self) -> str:
        return "\n".join(forked.said() for forked in self.ranks)

    def _bytes(self) -> bytes:
        files = sorted(self.out.rglob("*.safetensors"))
        assert files and (self.out / "train_report.json").is_file(), "the output is not complete"
        return b"".join(file.read_bytes() for file in files)

    def attack(self, kills: int, *, at_accesses: bool) -> None:
        """Kill a run this often, then let it end, and compare its output."""
        self.place.mkdir()
        for _ in range(kills):
            self._kill(at_accesses)
        ended = self.out.exists()
        codes = self._wait(self._start())
        said = self._said()
        assert "Traceback" not in said, said
        if ended:
            assert codes[0] == 3 and "the output exists" in said, said
            self.counts["had ended before"] += 1
        else:
            assert codes == [0, 0], said
            self.counts["continued" if "continuing from step" in said else "from the start"] += 1
        assert self._bytes() == self.expected, "the output differs from an undisturbed run's"
        left = [path.name for path in self.place.iterdir() if path != self.out]
        assert not left, f"left behind: {left}"
        shutil.rmtree(self.place)

    def _kill(self, at_accesses: bool) -> None:
        """Kill one rank or both, once."""
        if at_accesses:
            rank = self.random.randrange(SIZE)
            kill_at = [0, 0]
            kill_at[rank] = self.random.randrange(1, max(2, self.accesses[rank] + 1))
            chosen, pids = [rank], self._start(kill_at)
        else:
            chosen = self.random.choice(([0], [1], [0, 1]))
            pids = self._start()
            time.sleep(self.random.random() * self.seconds)
            for rank in chosen:
                os.kill(pids[rank], signal.SIGKILL)
        codes = self._wait(pids)
        said = self._said()
        assert "a bug in ciuic" not in said, said
        if len(chosen) == 1 and codes[chosen[0]] == -signal.SIGKILL:
            rank = chosen[0]
            named = f"rank {rank} (process {pids[rank]})" in said
            other = codes[1 - rank]
            assert other in (0, 3, 5, 130), said
            assert named or other != 5 or "cannot connect" in said or "has stopped" in said, said
            self.counts[f"rank {rank} killed, the other: exit {other}{', named it' if named else ''}"] += 1
        else:
            self.counts[f"killed {chosen}: exit {codes}"] += 1
        if self.out.exists():
            assert self._bytes() == self.expected, "the output of a killed run differs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--method", default="full")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        harness = Harness(options.model.resolve(), Path(folder), options.method, options.seed)
        print(f"undisturbed: {harness.seconds:.1f} s, write accesses {harness.accesses}", flush=True)
        done = number = 0
        while done < options.kills:
            kills = min(harness.random.randint(1, 2), options.kills - done)
            harness.attack(kills, at_accesses=bool(number % 2))
            done, number = done + kills, number + 1
            print(f"{done} kills of {number} runs: all ended in the same bytes", flush=True)
        print(f"{time.monotonic() - began:.0f} s")
        for what, count in sorted(harness.counts.items()):
            print(f"  {what}: {count}")


if __name__ == "__main__":
    main()
