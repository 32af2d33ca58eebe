"""Fault 39: single bytes of artifacts changed anywhere; each is found by --verify and does no harm when loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import BASE_SEED

sys.path.insert(0, str(Path(__file__).parent / "campaigns"))

from corrupting import Done

HARNESS = Path(__file__).parent / "campaigns" / "corrupting.py"


def corruptions(count: int, seed: int, *options: str) -> dict[str, tuple[int, int, int]]:
    """Of each place in an artifact: how many were refused when loaded, gave other text, gave the same text."""
    done = subprocess.run(
        [sys.executable, str(HARNESS), "--count", str(count), "--seed", str(seed), *options],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    rows = re.findall(r"^(\S.*?)\s{2,}(\d+)\s+(\d+)\s+(\d+)$", done.stdout, re.MULTILINE)
    return {kind: (int(refused), int(other), int(same)) for kind, refused, other, same in rows}


REFUSAL = "error: the artifact is damaged\n  file: out/config.json\n  try: fetch it again\n"


@pytest.mark.parametrize(
    ("code", "said", "clean"),
    [
        (0, "", True),
        (0, "warning: slow\n", True),
        (3, REFUSAL, True),
        (0, REFUSAL, False),
        (3, "", False),
        (3, REFUSAL.replace("try", "so"), False),
        (3, REFUSAL + REFUSAL, False),
        (1, REFUSAL, False),
        (-11, "", False),
        (-14, "", False),
        (3, "Traceback (most recent call last):\n" + REFUSAL, False),
        (0, "decode_kernel.cpp:7:1: runtime error: load of misaligned address", False),
        (3, "==1==ERROR: AddressSanitizer: heap-buffer-overflow\n" + REFUSAL, False),
    ],
)
def test_what_counts_as_a_finding(code: int, said: str, clean: bool) -> None:
    assert Done(code, "", said, peak=0).clean == clean


def test_fault_39_changed_bytes_are_found_and_do_no_harm() -> None:
    assert sum(corruptions(16, BASE_SEED, "--tiny")["all"]) == 16


@pytest.mark.campaign
def test_fault_39_two_hundred_changed_bytes() -> None:
    """`make corruptions` changes a thousand, under the sanitizers."""
    found = corruptions(200, 1 + BASE_SEED)
    assert sum(found["all"]) == 200
    refused, other, _ = found["weights: start of a blob"]
    assert refused > 3 and other > 3, "else only bytes were hit that do not matter"
    assert found["weights: header"][0] > 10 and len(found) > 9
