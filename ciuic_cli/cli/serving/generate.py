"""`ciuic generate`, and the options of text generation that it shares with `ciuic chat`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import Device, Json, PathArgument, announce_device, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.compression.options import check_device
from ciuic_cli.errors import UsageError
from ciuic_cli.process.libraries import require_training
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=1 << 20,
        show_default="256, or what fits the model",
        help="Most tokens to generate.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T", min=0, max=100, show_default="the model's own", help="0: always the most likely token."
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        min=0,
        max=1,
        show_default="the model's own",
        help="Sample from the most likely tokens that together have this probability.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, max=2**32 - 1, show_default="another each time", help="Random seed."),
]

Adapter = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        readable=False,
        show_default="none",
        help="LoRA adapter for the model: an output of `ciuic train`, or what PEFT saved.",
    ),
]


def opener(adapter: Path | None) -> Callable[[Path, str], Any]:
    """Return the `open_folder` of a `TextModel` with this adapter, if one is given.

    Raises:
        EnvironmentFault: the packages for adapters are missing.
        InputError: the folder has no adapter.
    """
    from ciuic_cli.evaluation.opening import open_model

    if adapter is None:
        return open_model
    require_training()
    from ciuic_cli.train.merging.adapter import adapted_model, require_adapter

    require_adapter(adapter)
    return lambda folder, device: adapted_model(folder, adapter, device, open_model)


def generate(
    model: PathArgument,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.")],
    adapter: Adapter = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Continue a text with an artifact or a checkpoint; the continuation appears as it is generated."""
    console = Console(json_mode=json)

    def action() -> None:
        check_device(device)
        if not prompt.strip():
            raise UsageError("--prompt is empty", remedy="give a text to continue")
        folder = locate(model)
        configure_numeric_libraries()
        from transformers.utils.logging import disable_progress_bar

        from ciuic_cli.serving.text_model import Sampling, TextModel

        disable_progress_bar()  # of loading, in transformers
        announce_device(console, device)
        opened = TextModel(folder, device, open_folder=opener(adapter))
        unwritten = [prompt]  # until the model accepts it: an error gets its own line

        def write(part: str) -> None:
            console.part("".join(unwritten) + part)
            unwritten.clear()

        answer = opened.complete(prompt, Sampling(max_new_tokens, temperature, top_p, seed), write)
        write("\n")
        console.json({"prompt": prompt, **asdict(answer)})

    execute(console, action)
