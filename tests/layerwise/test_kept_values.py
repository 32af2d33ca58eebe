"""Values of an override that are computed once."""

from __future__ import annotations

from pathlib import Path

import torch

from ciuic_cli.layerwise.overrides import KeptValues, only

CPU = torch.device("cpu")


class Source:
    """Random values of "a" and of two experts of "b", and how often each was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None]] = []
        self.values = {key: torch.randn(4, 6) for key in (("a", None), ("b/c", 0), ("b/c", 1))}

    def __call__(self, name: str, expert: int | None) -> torch.Tensor | None:
        self.asked.append((name, expert))
        value = self.values.get((name, expert))
        return None if value is None else value.clone()


def _rounded(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float()


def test_a_value_is_computed_once_and_rounded(tmp_path: Path) -> None:
    source = Source()
    kept = KeptValues(source, tmp_path, CPU, limit=1000)
    for _ in range(3):
        for key, value in source.values.items():
            found = kept(*key)
            assert found is not None and torch.equal(found, _rounded(value))
    assert sorted(source.asked, key=str) == sorted(source.values, key=str)
    kept.clear()
    assert not list(tmp_path.iterdir())


def test_values_beyond_the_limit_are_computed_again(tmp_path: Path) -> None:
    source = Source()
    kept = KeptValues(source, tmp_path, CPU, limit=2 * 2 * 24)
    for _ in range(2):
        for key, value in source.values.items():
            found = kept(*key)
            assert found is not None and torch.equal(found, _rounded(value))
    assert source.asked.count(("b/c", 1)) == 2 and len(source.asked) == 4
    assert len(list(tmp_path.iterdir())) == 2


def test_cleared_values_leave_room(tmp_path: Path) -> None:
    source = Source()
    kept = KeptValues(source, tmp_path, CPU, limit=2 * 24)
    for expert in (0, 1):
        for _ in range(2):
            assert kept("b/c", expert) is not None
        kept.clear("b/")
    assert kept("a", None) is not None and kept("a", None) is not None
    assert source.asked == [("b/c", 0), ("b/c", 1), ("a", None)]
    kept.clear("b/")
    assert len(list(tmp_path.iterdir())) == 1


def test_only_some_keys(tmp_path: Path) -> None:
    source = Source()
    some = only(KeptValues(source, tmp_path, CPU, limit=1000), {("a", None), ("d", None)})
    assert some("b/c", 0) is None and ("b/c", 0) not in source.asked
    found = some("a", None)
    assert found is not None and torch.equal(found, _rounded(source.values["a", None]))
    assert some("d", None) is None
