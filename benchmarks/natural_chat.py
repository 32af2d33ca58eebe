"""Conversations that people wrote, as training data.

    pip install chitchat-dataset     # MIT: 7,168 chats between strangers (Chit-Chat Challenge of BYU's PCC lab)
    pip install chatterbot-corpus    # BSD: short questions and answers, many of them for programmers
    python benchmarks/natural_chat.py TRAIN.jsonl HELDOUT.jsonl --model MODEL

The conversations come from one of these packages, which must be installed (`--source`). Whoever writes first is the
user. A long conversation is cut into pieces of whole exchanges. Left out are pieces with more than `--tokens` tokens
for the model whose folder is `--model`, and what occurs twice. No conversation has pieces in both files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Turns = list[str]
"""Texts of the user and the assistant in turn."""


def package_folder(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    found = find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"the package {name} is missing: pip install {name.replace('_', '-')}")
    return Path(found.origin).parent


def of_strangers() -> Iterator[Turns]:
    """The conversations of chitchat-dataset. Messages that a person sends one after another become one text."""
    stored = json.loads((package_folder("chitchat_dataset") / "dataset.json").read_text(encoding="utf-8"))
    for conversation in stored.values():
        turns: Turns = []
        last = None
        for message in (message for group in conversation["messages"] for message in group):
            text = " ".join(message["text"].split())
            if not text:
                continue
            if message["sender"] == last:
                turns[-1] += f"\n{text}"
            else:
                turns.append(text)
            last = message["sender"]
        yield turns


def of_bots() -> Iterator[Turns]:
    """The English conversations of chatterbot-corpus."""
    import yaml

    for file in sorted((package_folder("chatterbot_corpus") / "data" / "english").glob("*.yml")):
        for turns in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            yield [" ".join(str(turn).split()) for turn in turns]


SOURCES = {"chitchat-dataset": of_strangers, "chatterbot-corpus": of_bots}


def pieces(turns: Turns, most: int) -> Iterator[Turns]:
    """Whole exchanges in order, as many in a piece as have at most `most` characters. A longer exchange is left out."""
    piece: Turns = []
    for question, answer in zip(turns[::2], turns[1::2], strict=False):
        if len(question) + len(answer) > most or not (question and answer):
            if piece:
                yield piece
            piece = []
            continue
        if sum(map(len, piece)) + len(question) + len(answer) > most:
            yield piece
            piece = []
        piece += [question, answer]
    if piece:
        yield piece


def fits(tokenizer: Any, turns: Turns, most: int) -> bool:
    """True if the piece has at most `most` tokens with the tokenizer's chat template."""
    return len(tokenizer.apply_chat_template(messages_of(turns), return_dict=True)["input_ids"]) <= most


def messages_of(turns: Turns) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]


def line_of(turns: Turns) -> str:
    """A line of JSON."""
    return json.dumps({"messages": messages_of(turns)}, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--source", choices=SOURCES, default="chitchat-dataset")
    parser.add_argument("--conversations", type=int, default=600, help="most of the training file")
    parser.add_argument("--heldout-conversations", type=int, default=20)
    parser.add_argument("--most-characters", type=int, default=250, help="of a piece")
    parser.add_argument("--model", required=True, help="folder with the tokenizer and its chat template")
    parser.add_argument("--tokens", type=int, default=128, help="most of a piece")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of conversations")
    options = parser.parse_args()
    from ciuic_cli.text.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(options.model)
    found = list({tuple(turns): turns for turns in SOURCES[options.source]()}.values())
    random.Random(options.seed).shuffle(found)
    first = options.heldout_conversations
    seen: set[str] = set()
    for file, part in (
        (options.heldout, found[:first]),
        (options.train, found[first : first + options.conversations]),
    ):
        cut = [piece for turns in part for piece in pieces(turns, options.most_characters)]
        lines = [line_of(piece) for piece in cut if fits(tokenizer, piece, options.tokens)]
        lines = [line for line in dict.fromkeys(lines) if line not in seen]
        seen.update(lines)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{file}: {len(lines)} pieces of {len(part)} conversations")


if __name__ == "__main__":
    main()
