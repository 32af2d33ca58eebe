"""What a row's weights cost to code where some blocks of the input transform are louder than others.

The transform mixes the columns of a block of its own (`codecs/transform.py`), so a row is a Gaussian of another size
in each block, and has one scale for all of them. Loud blocks leave the code's range if the scale suits the mean, and
quiet ones have the error of the loud if it suits those. The scale that costs least is about that of an even row whose
mean square is the power mean of order 4 of the blocks'; its error is what that row would have at 5 bits, and up to a
third less at 3 (docs/experiments/codes/uneven-rows.md).
"""

from __future__ import annotations

import math

import torch

POWER = 4
"""Order of the power mean over blocks. At few bits a lower one would predict better, at many a higher one."""
_NOTHING = torch.finfo(torch.float32).tiny


def even_square(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """Mean square of the even rows that take the same scale, (m,), from the mean squares of each block, (m, blocks).

    width: columns of a block; blocks of even rows differ by chance, the more the narrower they are.
    """
    count = blocks.shape[1]
    mean = blocks.mean(1)
    unevenness = (blocks / mean.clamp_min(_NOTHING)[:, None]).pow(POWER).mean(1)
    return mean * (unevenness / _by_chance(count, width)) ** (1 / POWER)


def influence(blocks: torch.Tensor) -> torch.Tensor:
    """What the energy of each block counts for in the logarithm of the row's: derivatives, of (m, blocks) as above.

    They are e^(p-1) / Σ e^p of energies e and the power p.
    """
    loudest = blocks.amax(1, keepdim=True).clamp_min(_NOTHING)
    share = blocks / loudest
    return share ** (POWER - 1) / (loudest * (share**POWER).sum(1, keepdim=True)).clamp_min(_NOTHING)


def _by_chance(count: int, width: int) -> float:
    """E[(count · share)^POWER] of the share that one of so many blocks has in the square of a Gaussian."""
    own, whole = width / 2, count * width / 2
    moment = math.lgamma(own + POWER) - math.lgamma(own) + math.lgamma(whole) - math.lgamma(whole + POWER)
    return math.exp(moment + POWER * math.log(count))
