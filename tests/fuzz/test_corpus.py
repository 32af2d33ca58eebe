"""Fault 41: every input of the fuzzing corpus is refused or read without a crash; needs no fuzzer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from seeds import seeds
from targets import TARGETS, Folder

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted((path.parent.name, path.name) for path in CORPUS.glob("*/*"))


@pytest.fixture(scope="module")
def folder() -> Iterator[Folder]:
    made = Folder()
    yield made
    made.remove()


def test_every_target_has_a_corpus() -> None:
    assert {target for target, _ in INPUTS} == set(TARGETS)
    for target, inputs in seeds().items():
        for name, content in inputs.items():
            assert (CORPUS / target / name).read_bytes() == content


@pytest.mark.parametrize("target", TARGETS)
def test_fault_41_the_corpus_is_refused_or_read(target: str, folder: Folder) -> None:
    for of, name in INPUTS:
        if of == target:
            TARGETS[target]((CORPUS / target / name).read_bytes(), folder)


@pytest.mark.parametrize("target", TARGETS)
def test_fault_41_random_changes_of_the_corpus(target: str, folder: Folder) -> None:
    generator = random.Random(0)
    inputs = [(CORPUS / of / name).read_bytes() for of, name in INPUTS if of == target]
    for _ in range(300):
        data = bytearray(generator.choice(inputs))
        for _ in range(generator.randrange(1, 5)):
            place = generator.randrange(1, max(2, len(data)))
            data[place : place + generator.randrange(3)] = generator.randbytes(generator.randrange(3))
        TARGETS[target](bytes(data), folder)
