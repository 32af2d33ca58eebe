"""Which steps cannot be planned: fake tensors have no values, and codes no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ciuic_cli.errors import InputError
from ciuic_cli.runtime.views.dense_views import Codes

NEED_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What torch raises for an operator that fake tensors cannot compute; `func` is the operator."""


@contextmanager
def plannable(model: nn.Module) -> Iterator[None]:
    """Raise InputError where code needs values of fake tensors, or reads a compressed weight as a dense one.

    The message names the operator or the weight. Other errors pass.
    """
    original = Codes.matrices

    def refused(codes: Codes) -> Any:
        name = next((name for name, one in model.named_parameters() if one is codes.blob), "a weight")
        raise _unplanned(model, f"its code reads {name} as a dense matrix")

    type.__setattr__(Codes, "matrices", refused)
    try:
        yield
    except NEED_VALUES as error:
        raise _unplanned(model, f"the operator {error.func} needs values of tensors") from error
    finally:
        type.__setattr__(Codes, "matrices", original)


def _unplanned(model: nn.Module, reason: str) -> InputError:
    return InputError(
        f"the memory of a step cannot be planned for {type(model).__name__}: {reason}",
        remedy="leave out --max-memory; such a model cannot be planned",
    )
