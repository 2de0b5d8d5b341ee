"""Conversations to token ids, the same ones in training, chat and serving; and which of them the assistant said.

What an assistant turn says is found in one of two ways. A template with `{% generation %}` tags marks it itself. Without tags
it is measured: the conversation up to the turn, with the template's opening of an answer, must be how the whole conversation
begins; what follows, through the turn's end token, is the turn. Where a template writes an earlier turn otherwise once a later
one follows (Qwen3 leaves out earlier thinking), the turn in the conversation is not what the model would have said, and
training on it is refused by its number.
"""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from polydecode.errors import UserError

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING = "enable_thinking"

Spans = list[tuple[list[int], bool]]
"""(token ids, are they trained), one after the other."""


def record_thinking(tokenizer: PreTrainedTokenizerBase, enable_thinking: bool | None) -> None:
    """Keep the choice with the tokenizer, which is saved beside the checkpoint, so that chat and serving template alike."""
    if enable_thinking is not None:
        tokenizer.init_kwargs[_THINKING] = enable_thinking


def chat_text(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool = True,
    tools: list | None = None,
    enable_thinking: bool | None = None,
) -> str:
    """The conversation as the tokenizer's template writes it; `enable_thinking` None is what the tokenizer has recorded.

    Raises `UserError` when the template refuses the messages.
    """
    thinking = tokenizer.init_kwargs.get(_THINKING) if enable_thinking is None else enable_thinking
    chosen: dict[str, Any] = {} if thinking is None else {_THINKING: thinking}
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **chosen
        )
    except Exception as error:
        raise UserError(
            f"the chat template refuses these messages: {(str(error) or 'error').splitlines()[0]}"
        ) from None
    assert isinstance(text, str)
    return text


def chat_ids(
    messages: Any, tokenizer: PreTrainedTokenizerBase, tools: list | None = None, enable_thinking: bool | None = None
) -> list[int]:
    """Token ids that ask for the next assistant turn: what training puts before an answer and what generation is given."""
    text = chat_text(checked_messages(messages), tokenizer, True, tools, enable_thinking)
    return _ids(text, tokenizer)


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with their content as one string; a list of text parts is joined. `UserError` names the message at
    fault."""
    if not isinstance(messages, list) or not messages:
        raise UserError("messages must be a list of objects with role and content")
    checked = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"messages must be a list of objects with role and content; message {number} is not one")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text_part(part, number) for part in content)
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise UserError(f"messages: the content of message {number} must be text or a list of text parts")
        checked.append({**message, "content": content})
    return checked


def _text_part(part: Any, number: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise UserError(f"messages: message {number} has a part of type {kind!r}; only text parts can be used")


def message_spans(
    messages: Any,
    tokenizer: PreTrainedTokenizerBase,
    last_only: bool = False,
    tools: list | None = None,
    enable_thinking: bool | None = None,
) -> Spans:
    """The conversation through its last assistant turn, as spans: trained are the assistant's words and their end token.

    `last_only` trains the last assistant turn alone. Raises `UserError` for a conversation without an answer, an empty
    answer, and a turn that the template rewrites.
    """
    messages = checked_messages(messages)
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; give prompt and response instead")
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not turns:
        raise UserError("no assistant message to train on")
    for number, i in enumerate(turns, 1):
        if (
            not messages[i]["content"].strip()
            and not messages[i].get("tool_calls")
            and (not last_only or i == turns[-1])
        ):
            raise UserError(f"assistant turn {number} of {len(turns)} is empty; nothing to train on there")
    messages = messages[: turns[-1] + 1]
    if _GENERATION_TAG.search(_template_of(tokenizer)):
        return _tagged_spans(messages, tokenizer, last_only, tools, enable_thinking)
    return _measured_spans(messages, turns, tokenizer, last_only, tools, enable_thinking)


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.get_chat_template()
    assert isinstance(template, str)
    return template


def _measured_spans(
    messages: list[dict],
    turns: list[int],
    tokenizer: PreTrainedTokenizerBase,
    last_only: bool,
    tools: list | None,
    enable_thinking: bool | None,
) -> Spans:
    whole = chat_text(messages, tokenizer, False, tools, enable_thinking)
    cuts: list[tuple[int, int]] = []
    for i in turns[-1:] if last_only else turns:
        number = f"assistant turn {turns.index(i) + 1} of {len(turns)}"
        before = chat_text(messages[:i], tokenizer, True, tools, enable_thinking)
        after = chat_text(messages[: i + 1], tokenizer, False, tools, enable_thinking)
        if not after.startswith(before):
            raise UserError(
                f"the chat template opens {number} otherwise than it asks for it (is enable_thinking right?)"
            )
        stop = _end_of_turn(after, len(before), tokenizer)
        if not whole.startswith(after[:stop]):
            raise UserError(
                f"the chat template rewrites {number} once a later one follows, so it cannot be trained in this "
                "conversation: give train_on last_assistant, or a conversation for each answer"
            )
        cuts.append((len(before), stop))
    spans = _spans_between(whole, cuts, tokenizer)
    if not _ends(tokenizer, whole, cuts[-1]):
        spans[-1] = (spans[-1][0] + _end(tokenizer), True)
    return spans


def _end_of_turn(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Where the turn that begins at `start` ends: behind the last special token, which is its end token; without one, at the
    end of the text."""
    stops = [
        text.rfind(token, start) + len(token) for token in tokenizer.all_special_tokens if text.find(token, start) >= 0
    ]
    return max(stops, default=len(text))


def _ends(tokenizer: PreTrainedTokenizerBase, text: str, cut: tuple[int, int]) -> bool:
    return any(text[cut[0] : cut[1]].endswith(token) for token in tokenizer.all_special_tokens)


def _spans_between(text: str, cuts: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> Spans:
    """Spans of `text` with the `cuts` trained. What is before a cut is tokenised as generation tokenises it, without what
    follows, so that no token reaches over the border."""
    spans: Spans = []
    done: list[int] = []
    at = 0
    for start, stop in cuts:
        for end, trained in ((start, False), (stop, True)):
            ids = _ids(text[:end], tokenizer)
            new = ids[len(done) :] if ids[: len(done)] == done else _ids(text[at:end], tokenizer)
            spans.append((new, trained))
            done, at = done + new, end
    return spans


def _tagged_spans(
    messages: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    last_only: bool,
    tools: list | None,
    enable_thinking: bool | None,
) -> Spans:
    thinking = tokenizer.init_kwargs.get(_THINKING) if enable_thinking is None else enable_thinking
    chosen: dict[str, Any] = {} if thinking is None else {_THINKING: thinking}
    try:
        out: Any = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **chosen
        )
    except Exception as error:
        raise UserError(
            f"the chat template refuses these messages: {(str(error) or 'error').splitlines()[0]}"
        ) from None
    ids, mask = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
    special = set(tokenizer.all_special_ids)
    for i in range(1, len(ids)):  # an end token that the template leaves outside its tags
        if mask[i - 1] and not mask[i] and ids[i] in special and ids[i - 1] not in special:
            mask[i] = True
    if not any(mask):
        raise UserError("the chat template's generation tags mark nothing of this conversation")
    stop = len(mask) - mask[::-1].index(True)
    start = max((i for i in range(stop) if not mask[i]), default=-1) + 1
    spans: Spans = []
    for i, (token, trained) in enumerate(zip(ids[:stop], mask[:stop], strict=True)):
        trained = trained and (not last_only or i >= start)
        if spans and spans[-1][1] == trained:
            spans[-1][0].append(token)
        else:
            spans.append(([token], trained))
    return spans


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-sequence token")
    return [tokenizer.eos_token_id]
