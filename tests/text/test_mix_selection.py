"""The sequences of the mix that are added to a user's text are those with tokens that it lacks."""

from __future__ import annotations

import itertools

import torch

from ciuic_cli.text.mix_selection import SMOOTHING, complementing

VOCABULARY = 12


def _likelihood(mix: torch.Tensor, present: torch.Tensor) -> float:
    counts = torch.bincount(present.reshape(-1), minlength=VOCABULARY) + SMOOTHING
    return float((torch.bincount(mix.reshape(-1), minlength=VOCABULARY) * counts.log()).sum())


def test_kinds_that_the_user_lacks_are_chosen_before_the_user_s_own() -> None:
    kinds = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    mix = kinds.repeat(4, 1)  # sequences 0, 3, 6 and 9 are of the first kind, and so on
    for own in range(3):
        chosen = complementing(mix, kinds[[own]].repeat(5, 1), 4, VOCABULARY) % 3
        assert own not in chosen
        assert sorted(chosen.tolist()).count(int(chosen[0])) == 2, "the other two kinds in equal shares"


def test_a_kind_that_is_rare_in_the_mix_waits_for_the_frequent_one() -> None:
    mix = torch.tensor([[0, 1, 2]] * 9 + [[3, 4, 5]])
    own = torch.tensor([[6, 7, 8]])
    # The eighth sequence of the frequent kind adds 9 log(8.5 / 7.5) = 1.13 for each token, the ninth 9 log(9.5 / 8.5) =
    # 1.00; the rare kind adds log(1.5 / 0.5) = 1.10.
    assert complementing(mix, own, 9, VOCABULARY).tolist() == [*range(8), 9]


def test_a_smaller_count_gives_the_first_ones_and_the_largest_gives_all() -> None:
    mix = torch.randint(0, VOCABULARY, (9, 20), generator=torch.Generator().manual_seed(1))
    everything = complementing(mix, mix[:2], len(mix), VOCABULARY).tolist()
    assert sorted(everything) == list(range(len(mix)))
    for count in range(len(mix)):
        assert complementing(mix, mix[:2], count, VOCABULARY).tolist() == everything[:count]


def test_each_step_is_the_best_one_and_the_end_is_near_the_best_set() -> None:
    generator = torch.Generator().manual_seed(2)
    own = torch.randint(0, 4, (2, 6), generator=generator)
    for _ in range(5):
        mix = torch.randint(0, VOCABULARY, (7, 6), generator=generator)
        start = _likelihood(mix, own)
        gains = {
            chosen: _likelihood(mix, torch.cat((own, mix[list(chosen)]))) - start
            for count in (1, 3)
            for chosen in itertools.combinations(range(len(mix)), count)
        }
        first = tuple(complementing(mix, own, 1, VOCABULARY).tolist())
        assert gains[first] == max(gain for chosen, gain in gains.items() if len(chosen) == 1)
        three = tuple(sorted(complementing(mix, own, 3, VOCABULARY).tolist()))
        assert gains[three] >= 0.95 * max(gains.values())


def test_without_a_text_of_the_user_the_mix_completes_itself() -> None:
    mix = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 1, 2]])
    assert complementing(mix, mix[:0], 2, VOCABULARY).tolist() == [0, 1]
