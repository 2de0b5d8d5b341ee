"""Records to examples: which tokens a record becomes, and which of them are trained.

An example is `text` (all of it trained), a `prompt` and its `response` (the response and its end token are trained), or
`messages` (every assistant turn and its end token are trained, or the last alone; the role headers are not: `chat.py`). An
example that is cut at `max_length`, or whose record says `finish_reason` "length", gets no end token: a cut never teaches an
end.
"""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from polydecode.config import DataConfig
from polydecode.data.chat import message_spans
from polydecode.data.examples import Example
from polydecode.errors import UserError


def encode(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Example:
    """The example of one record. Raises `UserError` (without the place) for a record of no known form."""
    example = encode_whole(record, tokenizer, config)
    if True not in example.loss_mask[: config.max_length]:
        length = example.loss_mask.index(True)
        raise UserError(f"the prompt alone has {length} tokens, max_length is {config.max_length}")
    return cut(example, config.max_length, tokenizer.eos_token_id)


def encode_whole(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Example:
    """The example of one record, however long."""
    is_text = False
    if "messages" in record:
        spans = _conversation(record["messages"], tokenizer, config, record.get("tools"))
    elif "prompt" in record and "response" in record:
        prompt, response = _string(record, "prompt"), _string(record, "response")
        if config.chat:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            spans = _conversation(turns, tokenizer, config, None)
        else:
            spans = [(prompt_ids(prompt, tokenizer), False), (_plain(response, tokenizer) + _end(tokenizer), True)]
    elif "text" in record:
        is_text = True
        ids = tokenizer(_string(record, "text"))["input_ids"]
        end = _end(tokenizer)
        spans = [(ids if ids[-1:] == end else ids + end, True)]
    else:
        raise UserError(
            f"has {', '.join(sorted(record)) or 'no keys'}; needs text, or prompt and response, or messages"
        )
    if record.get("finish_reason") == "length":  # an answer of `polydecode distill` that was cut: it teaches no end
        spans[-1] = (_without_end(spans[-1][0], tokenizer), spans[-1][1])
    ids = [i for span, _ in spans for i in span]
    trained = [t for span, t in spans for _ in span]
    if not any(trained):
        raise UserError("nothing to train on: the response is empty")
    return Example(ids, [not is_text and not t for t in trained], trained)


def encode_pieces(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[Example]:
    """The examples of one record: one, or with `long_text` "split" as many as its text fills."""
    if config.long_text == "split" and "text" in record and "messages" not in record and "response" not in record:
        return pieces(encode_whole(record, tokenizer, config), config.max_length)
    return [encode(record, tokenizer, config)]


def pieces(example: Example, max_length: int) -> list[Example]:
    """Text in pieces of `max_length` tokens, the last one shorter (and left out when it has one token, which nothing
    predicts); what has a prompt stays whole."""
    ids = example.input_ids
    if True in example.is_prompt or len(ids) <= max_length:
        return [example]
    starts = [s for s in range(0, len(ids), max_length) if len(ids) - s > 1]
    parts = [slice(start, start + max_length) for start in starts]
    return [
        replace(example, input_ids=ids[p], is_prompt=example.is_prompt[p], loss_mask=example.loss_mask[p])
        for p in parts
    ]


def cut(example: Example, max_length: int, end_id: int | None) -> Example:
    """The first `max_length` tokens, without context that nothing follows; text that is cut ends with no end token."""
    if len(example.input_ids) <= max_length:
        return example
    stop = max_length - example.loss_mask[:max_length][::-1].index(True)
    while not example.is_prompt[0] and stop > 1 and example.input_ids[stop - 1] == end_id:
        stop -= 1  # an end token inside the text, where the cut fell
    return Example(example.input_ids[:stop], example.is_prompt[:stop], example.loss_mask[:stop], example.example_id)


def _conversation(
    messages: Any, tokenizer: PreTrainedTokenizerBase, config: DataConfig, tools: list | None
) -> list[tuple[list[int], bool]]:
    return message_spans(messages, tokenizer, config.train_on == "last_assistant", tools, config.enable_thinking)


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


def _without_end(span: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A trained span up to the end token that closes it."""
    return span[:-1] if span[-1] in set(tokenizer.all_special_ids) else span
