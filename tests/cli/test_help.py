"""Help of every command."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ciuic_cli.cli.app import app


@pytest.mark.parametrize("command", [[], ["compress"], ["inspect"], ["eval"], ["bench"]])
def test_h_is_short_for_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.stdout == long.stdout and "--help" in short.stdout and "-h" in short.stdout
