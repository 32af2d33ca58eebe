"""The `ciuic` command.

Each subcommand has its own file in this folder. Heavy modules are imported inside the commands, so that `--help`, wrong
options and wrong paths are answered at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ciuic_cli._version import __version__
from ciuic_cli.cli.bench import bench
from ciuic_cli.cli.compress import compress
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.eval import evaluate
from ciuic_cli.cli.exit_codes import run
from ciuic_cli.cli.help import Command, Group, example
from ciuic_cli.cli.inspect import inspect
from ciuic_cli.cli.merge import merge
from ciuic_cli.cli.serving.chat import chat
from ciuic_cli.cli.serving.generate import generate
from ciuic_cli.cli.serving.serve import serve
from ciuic_cli.cli.sharing.export import export
from ciuic_cli.cli.sharing.push import push
from ciuic_cli.cli.train import train
from ciuic_cli.cli.training.plan import plan

EXIT_CODES = (
    "Exit codes: 0 done; 1 a bug of ciuic; 2 wrong usage; 3 bad input; 4 the target cannot be met; "
    "5 the machine cannot do it (disk, device, memory, lock); 130 interrupted."
)

app = typer.Typer(
    name="ciuic",
    cls=Group,
    epilog=EXIT_CODES,
    help="Compress a causal language model to a byte budget, and measure what was lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    cls=Command,
    epilog=example(
        "ciuic compress deepseek-model out --dry-run", "ciuic compress deepseek-model out --target-bpw 3"
    ),
)(compress)
app.command(cls=Command, epilog=example("ciuic inspect out --tensors", "ciuic inspect out --verify"))(inspect)
app.command(
    "eval",
    cls=Command,
    epilog=example(
        "ciuic eval out --base deepseek-model --text my-text.txt --limit 20",
        "ciuic eval out --base deepseek-model --tasks hellaswag,arc_easy --limit 200",
    ),
)(evaluate)
app.command(cls=Command, epilog=example("ciuic bench out --base deepseek-model -p 256 -n 64"))(bench)
app.command(cls=Command, epilog=example("ciuic train out adapter --train-file chats.jsonl"))(train)
app.command(
    cls=Command,
    epilog=example(
        "ciuic plan model --gpu-memory 24GB --gpus 1,8 --seqlen 2048",
        "ciuic plan model --gpu-memory 8GB --measure --page plan.html",
    ),
)(plan)
app.command(cls=Command, epilog=example("ciuic merge out adapter merged --train-file chats.jsonl"))(merge)
app.command(cls=Command, epilog=example('ciuic generate out --prompt "The island was" --temperature 0'))(
    generate
)
app.command(
    cls=Command, epilog=example("ciuic chat out", "ciuic chat out --system-prompt 'Answer briefly.'")
)(chat)
app.command(
    cls=Command,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=example("ciuic serve out", "ciuic serve out --port 8080 --enable-cors"),
)(serve)
app.command(
    cls=Command,
    epilog=example(
        "ciuic export out dense",
        "ciuic export original-model model.gguf --to gguf --target-bits 4.5 --llama-cpp llama.cpp",
    ),
)(export)
app.command(cls=Command, epilog=example("ciuic push out org/name", "ciuic push out org/name --private"))(push)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ciuic {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Compress a causal language model to a byte budget, and measure what was lost."""


def main() -> None:
    """Run the command of `sys.argv`, and exit with its code."""
    sys.exit(run(Console(), _dispatch))


def _dispatch() -> None:
    try:
        app()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Typer and Rich turn it into exit code 1
            raise end.__context__ from None
        raise


if __name__ == "__main__":
    main()
