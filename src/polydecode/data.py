"""Examples from jsonl, as token rows that know what is prompt and what is trained.

An example is `text` (all of it trained), a `prompt` and its `response` (the response and its end token are trained), or
`messages` (every assistant turn and its end token are trained, the role headers are not). An example that is cut at
`max_length` gets no end token: a cut never teaches an end.

Legend: B rows, T tokens.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from polydecode.config import DataConfig
from polydecode.errors import UserError


@dataclass
class Example:
    """One document: token ids, which of them are prompt, which are targets; `example_id` is its place in the data."""

    input_ids: list[int]
    is_prompt: list[bool]
    loss_mask: list[bool]
    example_id: int = 0


class Examples(Dataset):
    """A list of examples as a dataset."""

    def __init__(self, examples: Sequence[Example]):
        self.examples = list(examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> Example:
        return self.examples[i]


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, record) of every non-empty line.

    Raises `UserError` naming file and line for what is no JSON object or no UTF-8, and for a file without records.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no data file {str(path)!r}")
    found = False
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 (byte {error.start} of the line)") from None
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number}: a line must be a JSON object, this is a {type(record).__name__}")
            found = True
            yield number, record
    if not found:
        raise UserError(f"data file {str(path)!r} has no records")


def encode(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Example:
    """The example of one record. Raises `UserError` (without the place) for a record of no known form."""
    if "messages" in record:
        spans = _message_spans(record["messages"], tokenizer)
    elif "prompt" in record and "response" in record:
        prompt, response = _string(record, "prompt"), _string(record, "response")
        if config.chat:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            spans = _message_spans(turns, tokenizer)
        else:
            spans = [(prompt_ids(prompt, tokenizer), False), (_plain(response, tokenizer) + _end(tokenizer), True)]
    elif "text" in record:
        ids = tokenizer(_string(record, "text"))["input_ids"]
        end = _end(tokenizer)
        spans = [(ids if ids[-1:] == end else ids + end, True)]
    else:
        raise UserError(
            f"has {', '.join(sorted(record)) or 'no keys'}; needs text, or prompt and response, or messages"
        )
    ids = [i for span, _ in spans for i in span]
    trained = [t for span, t in spans for _ in span]
    if not any(trained):
        raise UserError("nothing to train on: the response is empty")
    if not any(trained[: config.max_length]):
        raise UserError(f"the prompt alone has {trained.index(True)} tokens, max_length is {config.max_length}")
    ids, trained = ids[: config.max_length], trained[: config.max_length]
    is_text = "text" in record and "messages" not in record and "prompt" not in record
    return Example(ids, [not is_text and not t for t in trained], trained)


def prompt_ids(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a plain prompt as generation gives them: with the tokenizer's start token, without an end token."""
    ids = tokenizer(prompt)["input_ids"]
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


def _string(record: dict[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str) or not value:
        raise UserError(f"{key} must be a non-empty string")
    return value


def _plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-sequence token")
    return [tokenizer.eos_token_id]


def _message_spans(messages: Any, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], bool]]:
    """The conversation as (token ids, trained) spans, measured by templating ever longer prefixes of it."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise UserError("messages must be a list of objects with role and content")
    if tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template; give prompt and response instead")
    done: list[int] = []
    spans: list[tuple[list[int], bool]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _template(messages[:i], tokenizer, add_generation_prompt=True)
        after = _template(messages[: i + 1], tokenizer, add_generation_prompt=False)
        if before[: len(done)] != done or after[: len(before)] != before:
            raise UserError("the chat template rewrites earlier turns, so the trained span cannot be measured")
        spans.append((before[len(done) :], False))
        spans.append((_through_end_token(after[len(before) :], tokenizer), True))
        done = done + spans[-2][0] + spans[-1][0]
    if not spans:
        raise UserError("no assistant message to train on")
    return spans


def _template(messages: list[dict], tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:
        raise UserError(f"the chat template refuses these messages: {str(error).splitlines()[0]}") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _through_end_token(span: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The assistant's content and its end token, without what the template puts after it (a newline, often)."""
    special = set(tokenizer.all_special_ids)
    ends = [i for i, token in enumerate(span) if token in special]
    return span[: ends[-1] + 1] if ends else span + _end(tokenizer)


def load_examples(paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[Example]:
    """All examples of `paths` in order, numbered from 0. Raises `UserError` naming file and line."""
    examples: list[Example] = []
    for path in paths:
        for number, record in read_jsonl(path):
            try:
                example = encode(record, tokenizer, config)
            except UserError as error:
                raise UserError(f"{path}:{number}: {error}") from None
            example.example_id = len(examples)
            examples.append(example)
    return examples


def split_held_out(examples: Sequence[Example], config: DataConfig) -> tuple[list[Example], list[Example]]:
    """(training, held-out): held out are those whose content hashes below `eval_fraction`, wherever they stand."""
    train: list[Example] = []
    held_out: list[Example] = []
    for example in examples:
        digest = hashlib.sha256(str(example.input_ids).encode()).digest()
        below = int.from_bytes(digest[:8], "big") / 2**64 < config.eval_fraction
        (held_out if below else train).append(example)
    if not train:
        raise UserError("all examples are held out; lower eval_fraction or give more data")
    return train, held_out[: config.max_eval_examples]


class Collator:
    """Examples to right-padded tensors (B, T), by the names of `Batch`."""

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        width = max(len(e.input_ids) for e in examples)

        def pad(rows: list[list], value: int) -> Tensor:
            return torch.tensor([[int(x) for x in row] + [value] * (width - len(row)) for row in rows])

        return {
            "input_ids": pad([e.input_ids for e in examples], self.pad_token_id),
            "attention_mask": pad([[1] * len(e.input_ids) for e in examples], 0),
            "is_prompt": pad([e.is_prompt for e in examples], 0).bool(),
            "loss_mask": pad([e.loss_mask for e in examples], 0).bool(),
            "example_ids": torch.tensor([e.example_id for e in examples]),
        }


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token id to fill rows with; what is padding is told by the attention mask, never by this id."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
