"""Examples from JSON lines: what is learned, and how they share rows. Bad data: test_bad_data.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ciuic_cli.errors import InputError
from ciuic_cli.train.examples import IGNORED, Example, Limits, read_examples
from ciuic_cli.train.packing import batch_of, pack, row_of

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    """One token per byte; </s> (id 256) ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(path: Path, tokenizer: Any, lines: list[Any], **options: Any) -> list[Example]:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return read_examples(path, tokenizer, Limits(64, None, 300), **{"train_on_inputs": False, **options})


def learned(tokenizer: Any, example: Example) -> str:
    assert len(example.ids) == len(example.labels)
    assert all(label in (IGNORED, token) for token, label in zip(example.ids, example.labels, strict=True))
    return tokenizer.decode([label for label in example.labels if label != IGNORED])


def test_only_completions_are_learned(tmp_path: Path, tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "ef"},
        {"role": "assistant", "content": "gh"},
    ]
    lines = [{"prompt": "say: ", "completion": "yes"}, b"", {"text": "hello"}, {"messages": chat}]
    found = read(tmp_path / "data.jsonl", tokenizer, lines)
    assert [learned(tokenizer, example) for example in found] == ["yes</s>", "ello</s>", "cd</s>gh</s>"]
    assert tokenizer.decode(found[2].ids) == "<user>ab</s><assistant>cd</s><user>ef</s><assistant>gh</s>"
    everything = read(tmp_path / "data.jsonl", tokenizer, lines, train_on_inputs=True)
    assert learned(tokenizer, everything[0]) == "ay: yes</s>"
    assert learned(tokenizer, everything[2]) == tokenizer.decode(found[2].ids[1:])


def test_a_template_that_rewrites_what_came_before(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    with pytest.raises(InputError, match="renders message 2 differently"):
        read(tmp_path / "data.jsonl", tokenizer, [{"messages": [user, answer, user, answer]}])


def test_rows_hold_every_example_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (200,), generator=generator).tolist()
    examples = [Example([number] * n, [number] * n) for number, n in enumerate(lengths)]
    rows = pack(examples, 40)
    assert all(len(row["input_ids"]) <= 40 for row in rows)
    assert sorted(token for row in rows for token in row["input_ids"]) == sorted(
        token for example in examples for token in example.ids
    )
    assert len(rows) <= 11 / 9 * sum(lengths) / 40 + 2
    for row in rows:
        starts = [at for at, position in enumerate(row["position_ids"]) if position == 0]
        assert [row["labels"][at] for at in starts] == [IGNORED] * len(starts)
        assert sum(label != IGNORED for label in row["labels"]) == len(row["labels"]) - len(starts)


def test_padding_is_not_learned() -> None:
    batch = batch_of([row_of([Example([5, 6, 7], [IGNORED, 6, 7])]), row_of([Example([8], [8])])], 1)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [IGNORED] * 3]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 1]]
