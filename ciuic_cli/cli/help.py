"""How the commands' help pages look: flags show no type, and options stand in named groups."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

BUDGET, CALIBRATION, PASSES, RUN = "Budget", "Calibration", "Passes", "Run"
"""Titles of the groups of `compress`'s options."""
TEXT, TASKS = "On a text", "On tasks"
"""Titles of the groups of `eval`'s options."""
DATA, STEPS, LORA, EVALUATION, MEMORY = "Data", "Steps", "LoRA", "Evaluation", "Memory"
"""Titles of the groups of `train`'s options. A group with long names has no short ones like -q, nor pairs like --no-x:
Typer has a column for these, and cuts the long names in a narrow terminal."""


def example(*commands: str) -> str:
    """The text below a help page: commands to copy, one a line."""
    return "\n\n".join(("Example:" if len(commands) == 1 else "Examples:", *commands))


class Command(TyperCommand):
    """A command whose help page follows the rules above."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters; `--help` joins the group of the last one."""
        return _tidied(super().get_params(ctx))


class Group(TyperGroup):
    """The same for `ciuic` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters."""
        return _tidied(super().get_params(ctx))


def _tidied(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""  # otherwise Typer prints <bool> beside a flag that takes no value
        if "--help" in parameter.opts:
            parameter.rich_help_panel = getattr(parameters[-2], "rich_help_panel", None)
    return parameters
