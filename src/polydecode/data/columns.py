"""Which columns of a record are its text, its prompt and response, or its messages.

The names that count are `messages`, `prompt` with `response`, and `text`. Other names come from the setting `columns`
(`prompt=question,response=answer`) or, when one reading alone is possible, from names in common use. What a file's first
record decides holds for the whole file: a file has one form. Common names are taken in any case (`Question`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polydecode.errors import UserError, unknown_name

TARGETS = ("messages", "prompt", "response", "text")
"""The names that `data.encode` reads."""
MESSAGE_NAMES = ("conversations", "conversation", "dialog", "dialogue", "chat")
PROMPT_NAMES = ("instruction", "question", "query", "input", "prompt")
RESPONSE_NAMES = ("output", "answer", "response", "completion")
TEXT_NAMES = ("content", "document")
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of the ShareGPT form (`from` and `value`)."""


def parse_columns(settings: Sequence[str]) -> dict[str, str]:
    """The setting `columns` as target to column name; `UserError` for what is no `target=name`.

    >>> parse_columns(["prompt=question,response=answer"])
    {'prompt': 'question', 'response': 'answer'}
    """
    mapping: dict[str, str] = {}
    for pair in (p for setting in settings for p in setting.split(",") if p.strip()):
        target, equals, name = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise UserError(f"columns has {pair!r}; write what it is and the column's name, such as prompt=question")
        if target not in TARGETS:
            raise unknown_name("target in columns", target, TARGETS)
        if mapping.get(target, name) != name:
            raise UserError(f"columns names {target} twice: {mapping[target]!r} and {name!r}")
        mapping[target] = name
    if len({t for t in mapping if t in ("messages", "text")}) + bool({"prompt", "response"} & set(mapping)) > 1:
        raise UserError("columns mixes forms; give text, or prompt and response, or messages")
    return mapping


@dataclass(frozen=True)
class Columns:
    """How records of one file are read: `names` is target to column, `input_name` is put under the prompt (Alpaca)."""

    names: dict[str, str]
    input_name: str | None = None
    given: bool = False
    targets_seen: frozenset[str] = frozenset()

    def record(self, row: dict[str, Any], place: str) -> dict[str, Any]:
        """`row` under the names that count; its other columns stay. Raises `UserError` at `place`."""
        row = {key: value for key, value in row.items() if value is not None}
        for name in self.names.values():
            if name not in row:
                raise UserError(
                    f"{place}: has {_listed(row)}; needs {_listed(self.names.values())}, as the first record"
                )
        seen = frozenset(row) & set(TARGETS)
        if not self.given and seen != self.targets_seen:
            first = _listed(self.targets_seen)
            raise UserError(f"{place}: has {_listed(seen)}, the file's first record has {first}; one form per file")
        rest = {k: v for k, v in row.items() if k not in TARGETS and k not in self.names.values()}
        record = rest | {target: row[name] for target, name in self.names.items()}
        if self.input_name is not None and row.get(self.input_name):
            record["prompt"] = f"{record['prompt']}\n\n{row[self.input_name]}"
        if "messages" in self.names:
            record["messages"] = _messages(record["messages"], place)
        return record

    def told(self) -> str | None:
        """What a person should know of the choice; None when nothing was guessed."""
        chosen = {t: n for t, n in self.names.items() if t != n}
        if self.given or not chosen:
            return None
        under = f", {self.input_name} under the prompt" if self.input_name else ""
        return "read " + ", ".join(f"{n} as {t}" for t, n in chosen.items()) + under + "; --columns says otherwise"


def choose_columns(mapping: dict[str, str], row: dict[str, Any], place: str) -> Columns:
    """The columns of the file whose first record is `row`, by the setting or by unambiguous common names."""
    keys = [key for key, value in row.items() if value is not None]
    seen = frozenset(keys) & set(TARGETS)
    if mapping:
        pair = {"prompt", "response"} & set(mapping)
        names = ({t: mapping.get(t, t) for t in ("prompt", "response")}) if pair else mapping
        for name in names.values():
            if name not in keys:
                raise UserError(f"{place}: {unknown_name('column', name, keys)}")
        return Columns(dict(names), given=True)
    for form in (("messages",), ("prompt", "response"), ("text",)):
        if set(form) <= set(keys):
            return Columns({t: t for t in form}, targets_seen=seen)
    return _guessed(keys, seen, place)


def _guessed(keys: list[str], seen: frozenset[str], place: str) -> Columns:
    spelled = {key.strip().lower(): key for key in reversed(keys)}
    if {"instruction", "output"} <= set(spelled) and not {"response", "answer", "completion", "question"} & set(
        spelled
    ):
        names = {"prompt": spelled["instruction"], "response": spelled["output"]}
        return Columns(names, spelled.get("input"), targets_seen=seen)
    messages, prompts, responses, texts = (
        [spelled[name] for name in names if name in spelled]
        for names in (
            (*MESSAGE_NAMES, "messages"),
            PROMPT_NAMES,
            RESPONSE_NAMES,
            (*TEXT_NAMES, "text"),
        )
    )
    found = [{"messages": name} for name in messages]
    found += [{"prompt": p, "response": r} for p in prompts for r in responses]
    found += [{"text": name} for name in texts]
    if len(found) == 1:
        return Columns(found[0], targets_seen=seen)
    needs = "needs text, or prompt and response, or messages"
    if found:
        needs = "which can be read in several ways"
    raise UserError(
        f"{place}: has {', '.join(keys) or 'no columns'}; {needs}; say which with --columns, {_suggested(keys)}"
    )


def _suggested(keys: list[str]) -> str:
    """An example of the setting in the file's own names: its first two columns that are no number or id, or its only one."""
    own = [key for key in keys if key.strip().lower() not in ("id", "index", "idx", "#", "")] or ["NAME"]
    if len(own) == 1:
        return f"such as text={own[0]}"
    return f"such as prompt={own[0]},response={own[1]}"


def _messages(value: Any, place: str) -> Any:
    """Messages as role and content; the ShareGPT form and a list written as JSON text are read too."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"{place}: messages is no valid JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        return value
    return [_message(message, place) for message in value]


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    message = {k: v for k, v in message.items() if v is not None or k == "content"}
    if "role" in message or not {"from", "value"} <= set(message):
        return message
    role = ROLES.get(str(message["from"]).lower())
    if role is None:
        raise UserError(f"{place}: {unknown_name('sender', str(message['from']), ROLES)}")
    rest = {k: v for k, v in message.items() if k not in ("from", "value")}
    return {"role": role, "content": message["value"], **rest}


def _listed(names: Any) -> str:
    return ", ".join(sorted(str(n) for n in names)) or "no columns"
