"""What a run has before its first step: rows of tokens, and a description of what decides the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ciuic_cli.text.data_files import digest
from ciuic_cli.text.tokenizer import open_tokenizer
from ciuic_cli.train.examples import Example, Limits, read_examples
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.packing import Row, pack, row_of


def read_rows(folder: Path, options: TrainOptions) -> tuple[list[Example], list[Row]]:
    """The examples of the training file, and the rows that they fill, for the model in `folder`."""
    examples = _read(folder, options.train_file, options)
    return examples, _rows(examples, options)


def read_held_out(folder: Path, options: TrainOptions) -> list[Row]:
    """The rows of the evaluation file; none without one."""
    return [] if options.eval_file is None else _rows(_read(folder, options.eval_file, options), options)


def describe(folder: Path, options: TrainOptions, device: torch.device) -> dict[str, Any]:
    """What decides the result: options, data, model and kind of device. A continued run must have the same."""
    description = options.to_dict()
    for name in ("train_file", "eval_file"):
        file = getattr(options, name)
        if file is not None:
            description[f"{name}_bytes"], description[f"{name}_sha256"] = digest(file)
    return {
        **description,
        "model": str(folder.resolve()),
        "model_files": {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))},
        "device": device.type,
    }


def padding_of(model: Any) -> int:
    """The token that fills short rows."""
    tokens = (model.config.pad_token_id, model.config.eos_token_id, 0)
    return next(token for token in tokens if isinstance(token, int))


def _read(folder: Path, file: Path, options: TrainOptions) -> list[Example]:
    limits = Limits.of_model(folder, options.sequence_len)
    return read_examples(file, open_tokenizer(folder), limits, train_on_inputs=options.train_on_inputs)


def _rows(examples: list[Example], options: TrainOptions) -> list[Row]:
    if options.sample_packing:
        return pack(examples, options.sequence_len)
    return [row_of([example]) for example in examples]
