"""Help of every command."""

from __future__ import annotations

import re
import shlex

import pytest
from help_texts import COMMANDS, SNAPSHOTS, help_of, snapshot_of
from typer.main import get_command
from typer.testing import CliRunner

from ciuic_cli.cli.app import app
from ciuic_cli.cli.help import BUDGET, CALIBRATION, PASSES, RUN
from ciuic_cli.compression.options import BITS


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_page_is_that_of_its_snapshot(name: str) -> None:
    """If the change is meant: python tests/cli/help_texts.py"""
    assert help_of(*name.split()) == snapshot_of(name).read_text(encoding="utf-8")


def test_there_is_no_snapshot_of_another_command() -> None:
    assert {file.stem for file in SNAPSHOTS.iterdir()} == {"ciuic", *COMMANDS}


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_h_is_short_for_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.stdout == long.stdout and "--help" in short.stdout and "-h" in short.stdout


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_flags_show_no_type_and_nothing_is_cut_off(command: list[str]) -> None:
    text = help_of(*command)
    assert (
        "bool" not in text
        and "\u2026" not in text
        and "..." not in text.replace("[ARGS]...", "").replace("BITS,...", "").replace("NAME,...", "")
    )


def test_trains_long_names_are_whole_in_a_narrow_terminal() -> None:
    assert "\u2026" not in help_of("train", columns=80)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_the_command_accepts(name: str) -> None:
    end = re.split("Examples?:", help_of(name))
    assert len(end) == 2
    examples = [line.strip() for line in end[1].splitlines() if line.strip()]
    assert examples and all(example.startswith(f"ciuic {name} ") for example in examples)
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    for example in examples:
        command.make_context(name, shlex.split(example)[2:])


def test_options_of_compress_stand_in_groups() -> None:
    text = help_of("compress")
    positions = [text.index(f"\u2500 {title} \u2500") for title in (BUDGET, CALIBRATION, PASSES, RUN)]
    assert positions == sorted(positions) and "\u2500 Options \u2500" not in text
    for option, group in (
        ("--target-size", 0),
        ("--seqlen", 1),
        ("--bits", 2),
        ("--force", 3),
        ("--help", 3),
    ):
        following = [*positions[1:], len(text)][group]
        assert positions[group] < text.index(f"\u2502 {option} ") < following, option


def test_help_lists_all_bits() -> None:
    words = " ".join(re.sub(r"[\u2502]", " ", help_of("compress")).split())
    assert ", ".join(f"{bits:g}" for bits in BITS if bits) in words
