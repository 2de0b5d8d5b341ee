"""Records to examples: which tokens a record becomes, and which of them are trained.

An example is `text` (all of it trained), a `prompt` and its `response` (the response and its end token are trained), or
`messages` (every assistant turn and its end token are trained, the role headers are not). An example that is cut at
`max_length`, or whose record says `finish_reason` "length", gets no end token: a cut never teaches an end.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from polydecode.config import DataConfig
from polydecode.data.examples import Example
from polydecode.errors import UserError


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
    if record.get("finish_reason") == "length":  # an answer of `polydecode distill` that was cut: it teaches no end
        spans[-1] = (_without_end(spans[-1][0], tokenizer), spans[-1][1])
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


def _without_end(span: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A trained span up to the end token that closes it."""
    return span[:-1] if span[-1] in set(tokenizer.all_special_ids) else span
