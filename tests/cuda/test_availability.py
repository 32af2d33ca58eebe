"""If the kernels cannot run, `available` warns once with the reason and raises nothing."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.kernels import availability
from ciuic_cli.kernels.launcher import launcher_for


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_known", {})


def test_not_on_the_cpu() -> None:
    works, reason = availability.available("cpu")
    assert not works and "'cpu'" in reason


def test_a_failure_is_a_visible_notice_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise EnvironmentFault("the compiler is missing", remedy="Install it.")

    monkeypatch.setattr(availability, "launcher_for", fail)
    with pytest.warns(RuntimeWarning, match=r"compiler is missing\. Install it"):
        works, reason = availability.available("cuda:0")
    assert not works and "compiler is missing" in reason
    assert availability.available("cuda:0") == (works, reason)  # cached: no second warning


def test_launching_on_other_devices_is_refused() -> None:
    with pytest.raises(UsageError, match="meta"):
        launcher_for(torch.device("meta"))
