"""`TextModel`: an artifact or a checkpoint that continues texts and answers messages, by transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.checkpoint.architecture import config_faults
from ciuic_cli.checkpoint.config.numbers import max_positions
from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.errors import InputError, UsageError
from ciuic_cli.evaluation.opening import open_model
from ciuic_cli.text.tokenizer import open_tokenizer, require_known_tokens, tokenizer_faults

DEFAULT_NEW_TOKENS = 256
"""Most tokens of an answer, as in `transformers chat`."""
Message = dict[str, str]
"""A message of a chat: "role" (system, user or assistant) and "content"."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. What is None, the model's generation_config.json decides.

    Attributes:
        max_new_tokens: most tokens of an answer; None: DEFAULT_NEW_TOKENS, or fewer if the positions end before.
        temperature: 0 takes the most likely token; a higher one samples.
        top_p: sample from the most likely tokens that together have this probability.
        seed: of torch's random numbers; None: another answer each time.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def options(self) -> dict[str, Any]:
        """Options of transformers' `generate`."""
        if self.temperature == 0:
            # None and 1 undo what generation_config.json asks for; transformers would warn of values without effect
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        given = {"temperature": self.temperature, "top_p": self.top_p}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {"do_sample": True, **chosen} if chosen else {}


@dataclass(frozen=True)
class Answer:
    """A finished text without the prompt, and the tokens of both."""

    text: str
    prompt_tokens: int
    new_tokens: int


class TextModel:
    """A model with its tokenizer.

    Args:
        path: artifact or checkpoint, a folder or a hub id.
        device: "auto", "cpu", "cuda" or "cuda:N".
        chat: the model is to answer messages.
        open_folder: opens the model in a folder on a device.

    Raises:
        InputError: as `open_folder`; or `chat`, and the model has no chat template.
        EnvironmentFault: as `open_folder`.
    """

    def __init__(
        self,
        path: str | Path,
        device: str = "auto",
        *,
        chat: bool = False,
        open_folder: Callable[[Path, str], Any] = open_model,
    ) -> None:
        self.folder = locate(path)
        self.tokenizer = open_tokenizer(self.folder)
        if chat and (fault := no_chat_template(self.tokenizer, self.folder)) is not None:
            raise fault
        self.model = open_folder(self.folder, device)

    def complete(self, prompt: str, sampling: Sampling, write: Callable[[str], None]) -> Answer:
        """Continue a text. write: called with each new part of the continuation.

        Raises UsageError if the model has too few positions.
        """
        with tokenizer_faults(self.folder):
            ids = self.tokenizer(prompt)["input_ids"]
        return self._generate(ids, sampling, write)

    def reply(self, messages: Sequence[Message], sampling: Sampling, write: Callable[[str], None]) -> Answer:
        """Answer the last message of a chat, if the model was opened for that. write: called with each new part.

        Raises:
            InputError: the template refuses the messages.
            UsageError: the model has too few positions.
        """
        with tokenizer_faults(self.folder):
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        return self._generate(ids, sampling, write)

    @torch.inference_mode()
    def _generate(self, ids: list[int], sampling: Sampling, write: Callable[[str], None]) -> Answer:
        config = self.model.config.get_text_config()
        if not ids:
            raise UsageError("the prompt has no tokens", remedy="give a text to continue")
        require_known_tokens(self.tokenizer, ids, config.vocab_size)
        count = self._new_tokens(len(ids), sampling.max_new_tokens)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        prompt = torch.tensor([ids], device=self.model.device)
        pads = (
            self.model.generation_config.pad_token_id,
            self.tokenizer.pad_token_id,
            self.tokenizer.eos_token_id,
        )
        with config_faults(self.folder / "config.json"):
            output = self.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=_streamer(self.tokenizer, write),
                max_new_tokens=count,
                pad_token_id=next((token for token in pads if token is not None), 0),
                **sampling.options(),
            )
        new = output[0, len(ids) :]
        with tokenizer_faults(self.folder):
            return Answer(str(self.tokenizer.decode(new, skip_special_tokens=True)), len(ids), len(new))

    def _new_tokens(self, prompt_tokens: int, wanted: int | None) -> int:
        """Tokens to generate. Raises UsageError if the model's positions do not suffice."""
        positions = max_positions(self.model.config)
        left = DEFAULT_NEW_TOKENS if positions is None else positions - prompt_tokens
        if positions is not None and left < (wanted or 1):
            raise UsageError(
                f"prompt and answer need {prompt_tokens + (wanted or 1):,} tokens, "
                f"the model has {positions:,} positions",
                file=self.folder,
                remedy="shorten the prompt, or lower --max-new-tokens",
            )
        return wanted or min(DEFAULT_NEW_TOKENS, left)


def no_chat_template(tokenizer: Any, folder: Path) -> InputError | None:
    """The error of a chat with a model whose tokenizer has no chat template; None if it has one."""
    if getattr(tokenizer, "chat_template", None):
        return None
    return InputError(
        "the model has no chat template, so it only continues texts",
        file=folder,
        remedy="use `ciuic generate` or /v1/completions, or put the chat_template.jinja of its family into the folder",
    )


def _streamer(tokenizer: Any, write: Callable[[str], None]) -> Any:
    """transformers' streamer: calls `write` with each part of the text as soon as no later token can change it."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                write(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
