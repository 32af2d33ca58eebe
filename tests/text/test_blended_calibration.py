"""A user's calibration text is blended with the package's mix, unless it is to be the only one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.text import calibration
from ciuic_cli.text.calibration import CalibrationSequences, calibration_sequences
from ciuic_cli.text.shares import MIX_WEIGHT, shares_of, with_mix

MIX, OWN = "a", "Z"


class Characters:
    """A tokenizer with one token per character, and one token before each text."""

    name_or_path = "characters"

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(character) for character in text]}


@pytest.fixture(autouse=True)
def short_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "builtin_calibration_text", lambda: MIX * 4998)  # and two line ends


def _sequences(
    tmp_path: Path, characters: int, *, only: bool = False, **options: int
) -> CalibrationSequences:
    text = tmp_path / "text.txt"
    text.write_text(OWN * (characters - 2))
    given = {"nsamples": 20, "seqlen": 101, "vocab_size": 256, **options}
    return calibration_sequences(Characters(), [text], only=only, **given)


def _kinds(tokens: torch.Tensor) -> list[str]:
    return ["".join(sorted({chr(token) for token in row[1:]} - {"\n"})) for row in tokens.tolist()]


def test_two_thirds_of_the_sequences_are_the_user_s(tmp_path: Path) -> None:
    found = _sequences(tmp_path, 3000)
    assert found.tokens.shape == (20, 101) and bool((found.tokens[:, 0] == 1).all())
    assert _kinds(found.tokens) == [MIX] * 6 + [OWN] * 14 and found.own == 14
    odd = _sequences(tmp_path, 3000, nsamples=7)
    assert _kinds(odd.tokens) == [MIX] * 2 + [OWN] * 5


def test_a_text_that_is_too_short_is_filled_up_by_the_other(tmp_path: Path) -> None:
    assert _kinds(_sequences(tmp_path, 300).tokens) == [MIX] * 17 + [OWN] * 3
    many = _sequences(tmp_path, 30_000, nsamples=210)
    assert _kinds(many.tokens) == [MIX] * 50 + [OWN] * 160
    long = _sequences(tmp_path, 400, seqlen=2001, nsamples=4)
    assert _kinds(long.tokens) == [MIX] * 2 + [OWN + MIX]
    assert int((long.tokens[-1] == ord(OWN)).sum()) == 398


def test_sequences_of_the_mix_have_the_kinds_that_the_user_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = ("a" * 100 + OWN * 300 + "b" * 100) * 9
    monkeypatch.setattr(calibration, "builtin_calibration_text", lambda: mix)
    found = _sequences(tmp_path, 3000, nsamples=12)
    assert found.own == 8 and _kinds(found.tokens[4:]) == [OWN] * 8
    assert sorted(chr(row[50]) for row in found.tokens[:4]) == ["a", "a", "b", "b"]


def test_a_sample_of_many_sequences_has_the_kinds_that_the_user_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recovery nearly the whole mix is chosen; the statistics see a few of its sequences."""
    mix = "a" * 100 + OWN * 4000 + "b" * 100
    monkeypatch.setattr(calibration, "builtin_calibration_text", lambda: mix)
    found = _sequences(tmp_path, 9000, nsamples=120)
    assert len(found.tokens) - found.own == 40
    sampled = found.sample(6).tolist()
    assert sampled[:2] == sorted(sampled[:2])
    assert [chr(found.tokens[number][50]) for number in sampled] == ["a", "b"] + [OWN] * 4


def test_only_the_user_s_text(tmp_path: Path) -> None:
    found = _sequences(tmp_path, 3000, only=True)
    assert _kinds(found.tokens) == [OWN] * 20 and found.own == 20
    alone = calibration_sequences(Characters(), [], only=False, nsamples=20, seqlen=101, vocab_size=256)
    assert alone.tokens.shape == (20, 101) and alone.own == 0


@pytest.mark.parametrize(
    ("count", "mix", "own", "shares"),
    [
        (24, 99, 99, (8, 16)),
        (7, 9, 9, (2, 5)),
        (24, 99, 3, (21, 3)),
        (24, 5, 99, (5, 19)),
        (24, 5, 3, (5, 3)),
        (2, 9, 9, (0, 2)),
        (1, 0, 9, (0, 1)),
    ],
)
def test_shares(count: int, mix: int, own: int, shares: tuple[int, int]) -> None:
    assert shares_of(count, mix, own) == shares


@pytest.mark.parametrize("own", [2, 3, 4, 5, 6, 7, 24, 64, 128, 1 << 20])
def test_the_mix_replaces_none_of_the_user_s_sequences(own: int) -> None:
    assert shares_of(with_mix(own), 1 << 30, 1 << 30) == (with_mix(own) - own, own)


def test_a_sample_takes_all_of_a_short_text_and_spreads_over_a_long_one() -> None:
    """With recovery there are more sequences than the statistics see; the user's few must be among those."""
    text = CalibrationSequences(torch.arange(488)[:, None], own=10)
    chosen = text.sample(128).tolist()
    assert chosen[-10:] == list(range(478, 488)) and len(set(chosen)) == 128
    assert max(after - before for before, after in itertools.pairwise(chosen[:118])) <= 6
    assert text.weights.tolist() == pytest.approx(478 * [MIX_WEIGHT] + 10 * [1.0])
    alone = CalibrationSequences(torch.arange(488)[:, None], own=0)
    assert alone.weights.tolist() == 488 * [1.0]
    assert alone.sample(128).tolist() == [index * 488 // 128 for index in range(128)]


def test_sequences_of_several_passages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a user's text all passages of the mix have what that lacks; alone, one of four completes the others."""
    mix = ("a" * 100 + OWN * 300 + "b" * 100) * 9
    monkeypatch.setattr(calibration, "builtin_calibration_text", lambda: mix)
    found = _sequences(tmp_path, 3000, nsamples=12, passages=4)
    assert found.own == 8 and _kinds(found.tokens) == ["ab"] * 4 + [OWN] * 8
    monkeypatch.setattr(calibration, "builtin_calibration_text", lambda: "a" * 20_000 + "bcde" * 25)
    alone = calibration_sequences(
        Characters(), [], only=False, nsamples=20, seqlen=101, vocab_size=256, passages=4
    )
    assert alone.own == 0 and alone.tokens.shape == (20, 101)
    assert "abcde" in _kinds(alone.tokens) and bool((alone.tokens[:, 0] == 1).all())


def test_one_passage_of_the_mix_alone_is_a_stretch_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = "".join(map(chr, range(32, 127))) * 20
    monkeypatch.setattr(calibration, "builtin_calibration_text", lambda: mix)
    found = calibration_sequences(Characters(), [], only=False, nsamples=6, seqlen=101, vocab_size=256)
    stretches = ["".join(map(chr, row[1:])) for row in found.tokens.tolist()]
    assert stretches == [
        (mix + "\n\n")[start : start + 100] for start in (100 * i + 1302 * i // 6 for i in range(6))
    ]
