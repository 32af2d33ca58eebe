"""`ciuic chat`."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import Device, PathArgument, announce_device, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.serving.generate import Adapter, MaxNewTokens, Seed, Temperature, TopP, opener
from ciuic_cli.compression.options import check_device
from ciuic_cli.errors import UsageError
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

CLEAR, EXIT = "!clear", "!exit"
"""Lines that are commands, as in `transformers chat`."""


def chat(
    model: PathArgument,
    system_prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told before the chat.")
    ] = None,
    adapter: Adapter = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    device: Device = "auto",
) -> None:
    """Chat with an artifact or a checkpoint: each line of stdin is a message. The model runs in this process."""
    console = Console()

    def action() -> None:
        check_device(device)
        folder = locate(model)
        configure_numeric_libraries()
        from transformers.utils.logging import disable_progress_bar

        from ciuic_cli.serving.text_model import Message, Sampling, TextModel

        disable_progress_bar()  # of loading, in transformers
        announce_device(console, device)
        opened = TextModel(folder, device, chat=True, open_folder=opener(adapter))
        start: list[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        messages = list(start)
        sampling = Sampling(max_new_tokens, temperature, top_p, seed)
        console.hint(f"{CLEAR} starts a new chat; {EXIT} or the end of the input ends the program")
        while (line := _read_line()) is not None and line != EXIT:
            if line == CLEAR:
                messages = list(start)
            elif line:
                messages.append({"role": "user", "content": line})
                try:
                    answer = opened.reply(messages, sampling, console.part)
                except UsageError as error:  # the chat has outgrown the model's positions
                    console.error(error)
                    console.hint(f"{CLEAR} starts a new chat")
                    messages.pop()
                    continue
                console.part("\n")
                messages.append({"role": "assistant", "content": answer.text})

    execute(console, action)


def _read_line() -> str | None:
    """The next line of stdin without surrounding spaces; None at its end. A terminal shows a prompt."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # a Python that was built without it has no editing keys
            import readline  # noqa: F401 (gives `input` a history and editing keys)
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
