"""From prompts to a file of answers."""

import sys
import time
from typing import Any

from transformers import PreTrainedTokenizerBase

from polydecode.distill.engine import Answer, Engine
from polydecode.distill.output import Output
from polydecode.distill.prompts import Prompt
from polydecode.distill.settings import DistillConfig
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder

SECONDS_BETWEEN_LINES = 10.0


def distill(
    model: ParallelDecoder,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    config: DistillConfig,
    output: Output,
) -> dict[str, Any]:
    """Answer `prompts` into `output` (checked beforehand); returns its counts and `tokens_per_s` of this call.

    Records come in the order of the prompts, each with its `index`, `sample` and `finish_reason`. Empty answers, and without
    `keep_unfinished` those that were cut, are counted and left out. Raises `UserError` when nothing could be kept.
    """
    output.open()
    engine = Engine(model, config, tokenizer)
    todo = [Answer(prompt, sample) for prompt in prompts for sample in range(config.samples_per_prompt)]
    progress = _Progress(engine, len(todo), output.counts["answers"])
    model.eval()
    while output.counts["answers"] < len(todo):
        window = todo[output.counts["answers"] :][: config.window]
        before = engine.new_tokens
        engine.answers(window, progress.tell)
        records, counted = _records(window, tokenizer, config.keep_unfinished)
        output.append(records, {**counted, "new_tokens": engine.new_tokens - before})
        progress.done += len(window)
        progress.line(0)
    if not output.counts["written"]:
        output.discard()
        empty, cut = output.counts["empty"], output.counts["unfinished"]
        raise UserError(
            f"no answer was kept ({empty} empty, {cut} cut at max_new_tokens {config.max_new_tokens}): raise "
            "--max-new-tokens, or give --keep-unfinished"
        )
    output.finish()
    return {**output.counts, "tokens_per_s": round(progress.tokens_per_s(), 1)}


def _records(
    window: list[Answer], tokenizer: PreTrainedTokenizerBase, keep_unfinished: bool
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The window's records in order, and how many answers there were, were empty and were cut."""
    records = []
    counted = {"answers": len(window), "empty": 0, "unfinished": 0}
    for answer in window:
        text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        if not answer.finished:
            text = text.rstrip("\ufffd")  # half a character
        counted["unfinished"] += not answer.finished
        if not text.strip():
            counted["empty"] += 1
        elif answer.finished or keep_unfinished:
            records.append(_record(answer, text))
    return records, counted


def _record(answer: Answer, text: str) -> dict[str, Any]:
    prompt = answer.prompt
    if prompt.turns is None:
        said: dict[str, Any] = {"prompt": prompt.text, "response": text}
    else:
        said = {"messages": [*prompt.turns, {"role": "assistant", "content": text}]}
    ended = "stop" if answer.finished else "length"
    return {**said, "index": prompt.index, "sample": answer.sample, "finish_reason": ended}


class _Progress:
    """A line on stderr now and then: how many answers, how fast, how long yet."""

    def __init__(self, engine: Engine, total: int, done: int):
        self.engine, self.total, self.done, self.first = engine, total, done, done
        self.started = self.told = time.monotonic()

    def tokens_per_s(self) -> float:
        return self.engine.new_tokens / max(time.monotonic() - self.started, 1e-9)

    def tell(self, in_window: int) -> None:
        if time.monotonic() - self.told >= SECONDS_BETWEEN_LINES:
            self.line(in_window)

    def line(self, in_window: int) -> None:
        self.told = time.monotonic()
        done = self.done + in_window
        new = done - self.first
        left = int((self.told - self.started) / new * (self.total - done)) if new else None
        told = "?" if left is None else f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        speed = f"{self.engine.new_tokens:,} tokens  {self.tokens_per_s():.0f} tokens/s"
        print(f"{done:,} of {self.total:,} answers  {speed}  {told} left", file=sys.stderr, flush=True)
