"""Errors of tokenizer libraries as our own errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from ciuic_cli.errors import CiuicError, EnvironmentFault, InputError
from ciuic_cli.text.tokenizer import tokenizer_faults

_Panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Exception("WordLevel error"), InputError),
        (_Panic("no entry found for key"), InputError),
        (_Panic("ThreadPoolBuildError { kind: IOError }"), EnvironmentFault),
        (MemoryError(), EnvironmentFault),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(3), SystemExit),
    ],
)
def test_failures_name_the_tokenizer_and_interrupts_pass(
    tmp_path: Path, error: BaseException, expected: type[BaseException]
) -> None:
    with pytest.raises(BaseException) as caught, tokenizer_faults(tmp_path):
        raise error
    assert type(caught.value) is expected
    if expected is InputError:
        assert isinstance(caught.value, CiuicError) and caught.value.file == str(tmp_path)
