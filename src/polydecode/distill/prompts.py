"""Prompts from files, as tokens and as what their records say."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from polydecode.data import prompt_ids, read_jsonl
from polydecode.distill.settings import DistillConfig
from polydecode.errors import UserError


@dataclass
class Prompt:
    """One prompt: `index` counts from 0 in the file, `text` or `turns` is what it says, `ids` its tokens."""

    index: int
    text: str | None
    turns: list[dict[str, Any]] | None
    ids: list[int]


def read_prompts(config: DistillConfig, tokenizer: PreTrainedTokenizerBase, context: int) -> list[Prompt]:
    """All prompts of `config.prompts`, in order. `context`: tokens that prompt and answer must fit.

    Raises `UserError` with file and line for what cannot be read, answered or fitted.
    """
    prompts: list[Prompt] = []
    for number, record in _records(Path(config.prompts)):
        try:
            prompts.append(_prompt(len(prompts), record, config, tokenizer, context))
        except UserError as error:
            raise UserError(f"{config.prompts}:{number}: {error}") from None
    return prompts


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix == ".jsonl":
        yield from read_jsonl(path)
    elif path.suffix == ".txt":
        yield from _lines(path)
    else:
        raise UserError(f"prompts file {str(path)!r} must be .jsonl (prompt or messages) or .txt (one per line)")


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        raise UserError(f"no prompts file {str(path)!r}")
    found = False
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 (byte {error.start} of the line)") from None
            if line:
                found = True
                yield number, {"prompt": line}
    if not found:
        raise UserError(f"prompts file {str(path)!r} has no prompts")


def _prompt(
    index: int, record: dict[str, Any], config: DistillConfig, tokenizer: PreTrainedTokenizerBase, context: int
) -> Prompt:
    text, turns = None, None
    if "messages" in record:
        turns = _open_turns(record["messages"])
    elif "prompt" in record:
        text = record["prompt"]
        if not isinstance(text, str) or not text.strip():
            raise UserError("prompt must be a non-empty string")
        turns = [{"role": "user", "content": text}] if config.chat else None
    else:
        raise UserError(f"has {', '.join(sorted(record)) or 'no keys'}; needs prompt or messages")
    if turns is None:
        assert text is not None
        if config.system:
            raise UserError("a system prompt needs a conversation: give --chat, or messages")
        ids = prompt_ids(text, tokenizer)
    else:
        if config.system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": config.system}, *turns]
        text, ids = None, _templated(turns, tokenizer)
    if not ids:
        raise UserError("the prompt has no tokens")
    if len(ids) + config.max_new_tokens > context:
        raise UserError(
            f"the prompt has {len(ids)} tokens and max_new_tokens is {config.max_new_tokens}; together they must fit the "
            f"model's context of {context}"
        )
    return Prompt(index, text, turns, ids)


def _open_turns(messages: Any) -> list[dict[str, Any]]:
    """The conversation up to the turn to answer."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise UserError("messages must be a list of objects with role and content")
    turns = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not turns or turns[-1]["role"] in ("assistant", "system"):
        raise UserError("messages have no last user turn to answer")
    return turns


def _templated(turns: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template; give prompts without --chat")
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise UserError(f"the chat template refuses these messages: {str(error).splitlines()[0]}") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]
