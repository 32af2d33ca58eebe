"""The help page of every command, and its snapshot in `help/`.

After a change of an option, `python tests/cli/help_texts.py` writes the snapshots again; the diff shows what users see.
"""

from __future__ import annotations

from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from ciuic_cli.cli.app import app

SNAPSHOTS = Path(__file__).parent / "help"
COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


def help_of(*command: str, columns: int = 100) -> str:
    """The help page in so many columns; trailing spaces are removed."""
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": str(columns), "TERM": "dumb"})
    assert result.exit_code == 0, result.stderr
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines()) + "\n"


def snapshot_of(name: str) -> Path:
    """The file with the page of a command, or of `ciuic` itself if the name is empty."""
    return SNAPSHOTS / f"{name or 'ciuic'}.txt"


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for name in ("", *COMMANDS):
        snapshot_of(name).write_text(help_of(*name.split()), encoding="utf-8")
