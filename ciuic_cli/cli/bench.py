"""`ciuic bench`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import Base, Device, Json, PathArgument, Quiet, announce_device, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.tables import show_bench
from ciuic_cli.cli.values import parse_depths
from ciuic_cli.compression.options import check_device
from ciuic_cli.evaluation.bench import NEW_TOKENS, PROMPT_TOKENS


def _tokens(short: str, long: str, default: int, text: str) -> Any:
    return typer.Option(
        short,
        long,
        metavar="N",
        min=1,
        max=1 << 30,
        show_default=f"{default}, or what fits the model",
        help=text,
    )


def bench(
    path: PathArgument,
    base: Base = None,
    prompt_tokens: Annotated[
        int | None, _tokens("-p", "--prompt-tokens", PROMPT_TOKENS, "Tokens of the prompt (prefill).")
    ] = None,
    new_tokens: Annotated[
        int | None, _tokens("-n", "--new-tokens", NEW_TOKENS, "Tokens to generate (decode).")
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--depth",
            metavar="N,N",
            show_default="128,2048,8192, as far as the model goes",
            help="Tokens in the cache at which a decoding step is timed.",
        ),
    ] = None,
    repetitions: Annotated[
        int,
        typer.Option("-r", "--repetitions", metavar="N", min=1, max=1 << 30, help="Number of measured runs."),
    ] = 5,
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, max=1 << 30, help="Number of sequences per batch.")
    ] = 1,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="Also measure decoding by torch.compile (takes up to minutes to compile)."
        ),
    ] = False,
    device: Device = "auto",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure memory, prefill and decode speed of PATH, and of the original with --base, each in its own process."""
    console = Console(json_mode=json, quiet=quiet)

    def action() -> None:
        check_device(device)
        contexts = None if depth is None else parse_depths(depth)
        folder = locate(path)
        original = None if base is None else locate(base)
        from ciuic_cli.evaluation.bench import bench as run_bench

        announce_device(console, device)
        with console.progress() as progress:
            measured = run_bench(
                folder, base=original, prompt_tokens=prompt_tokens, new_tokens=new_tokens, contexts=contexts,
                repetitions=repetitions, batch_size=batch_size, device=device, compiled=compiled,
                progress=progress, hint=console.hint,
            )  # fmt: skip
        console.json(measured)
        show_bench(console, measured, str(folder))

    execute(console, action)
