"""`transformers serve` for one model: its options, its HTTP interface, and clear answers where a model cannot chat."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from ciuic_cli.errors import CiuicError, EnvironmentFault, UsageError
from ciuic_cli.serving.text_model import no_chat_template
from ciuic_cli.text.tokenizer import open_tokenizer

_LIBRARIES = ("fastapi", "uvicorn", "openai", "pydantic", "accelerate")
"""What `transformers serve` needs; the extra "serve" installs it."""
_CHAT_ROUTES = ("/v1/chat/completions", "/v1/responses")
"""Routes whose requests need a chat template."""


_CLICK_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""UsageError of click. Newer versions of typer contain their own click and do not export this class."""


def serve(folder: Path, host: str, port: int, options: Sequence[str], hint: Callable[[str], None]) -> None:
    """Serve the model of a folder over HTTP until a signal ends the process.

    Args:
        folder: artifact or checkpoint.
        host, port: where to listen.
        options: further options of `transformers serve`, as its command line takes them.
        hint: called with remarks; with the address as soon as the server listens there.

    Raises:
        EnvironmentFault: a library is missing, or the port cannot be used.
        InputError: the tokenizer cannot be loaded.
        UsageError: an option that `transformers serve` does not have.
    """
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise EnvironmentFault(
            f"serving needs {', '.join(missing)}", remedy='install the extra: pip install "ciuic-cli[serve]"'
        )
    refusal = no_chat_template(open_tokenizer(folder), folder)
    if refusal is not None:
        hint(f"{refusal.message}; /v1/completions works")
    command = _command(refusal, lambda: hint(f"serving {folder} at http://{host}:{port}/v1; Ctrl-C ends it"))
    arguments = [str(folder), "--host", host, "--port", str(port), "--non-blocking", *options]
    try:
        command(args=arguments, prog_name="ciuic serve", standalone_mode=False)
    except _CLICK_USAGE_ERROR as error:
        raise UsageError(
            error.format_message(), remedy="`transformers serve --help` lists the options"
        ) from error
    except SystemExit as end:  # of uvicorn, after it logged why it cannot listen
        if end.code:
            raise EnvironmentFault(
                f"the server cannot listen on {host}:{port}", remedy="choose another --port or --host"
            ) from end


def _command(refusal: CiuicError | None, announce: Callable[[], None]) -> Any:
    """The click command of a `transformers serve` that refuses chats with this error, and announces that it listens."""
    from transformers.cli.serve import Serve

    class Server(Serve):
        """transformers' server; with --non-blocking it calls `start_server`, which here runs until it is stopped."""

        def start_server(self) -> None:
            if refusal is not None:
                self.server.config.app = _refusing_chats(self.server.config.app, refusal)
            listen = self.server.startup

            async def startup(*args: Any, **options: Any) -> None:
                await listen(*args, **options)
                if self.server.started:
                    announce()

            self.server.startup = startup  # type: ignore[method-assign]
            self.server.run()

    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(Server)
    return get_command(app)


def _refusing_chats(app: Any, refusal: CiuicError) -> Callable[..., Awaitable[None]]:
    """An ASGI application that answers chat requests with status 400 and the error, and leaves the rest to `app`."""
    content = {
        "message": str(refusal),
        "type": "invalid_request_error",
    }  # as OpenAI's interface reports errors
    body = json.dumps({"error": content}).encode()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in _CHAT_ROUTES:
            await app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer
