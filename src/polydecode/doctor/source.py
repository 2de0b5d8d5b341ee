"""Findings about the model and its tokenizer."""

import re
from typing import Any

from polydecode.config import TrainConfig
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Finding

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


def model_findings(model: ParallelDecoder, source_rows: int) -> list[Finding]:
    """The head, and rows that the method adds to the vocabulary; `source_rows` are those of the source."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embeddings.weight
    findings = [Finding("head", "ok", "tied to the embeddings, and stays so" if tied else "a matrix of its own")]
    added = embeddings.weight.shape[0] - source_rows
    if added:
        says = f"{added} row is added to the {source_rows} (the tokenizer leaves none free)"
        findings.append(Finding("vocabulary", "ok", says))
    else:
        findings.append(Finding("vocabulary", "ok", f"{source_rows} rows, none is added"))
    return findings


def tokenizer_findings(tokenizer: Any, config: TrainConfig) -> list[Finding]:
    """End and padding tokens, and what the chat template lets us know."""
    findings = []
    if tokenizer.eos_token_id is None:
        mend = "set tokenizer.eos_token and save it again, or answers never learn to end"
        findings.append(Finding("end token", "fail", "the tokenizer has no end-of-sequence token", mend))
    elif tokenizer.pad_token_id == tokenizer.eos_token_id:
        says = "pad and eos are one token; padding is told by the attention mask alone, so the end stays trained"
        findings.append(Finding("end token", "ok", says))
    else:
        findings.append(Finding("end token", "ok", f"{tokenizer.eos_token!r}"))
    template = tokenizer.chat_template
    if template is None:
        wanted = config.chat
        says = "the tokenizer has none" + ("" if wanted else "; prompt/response and text data do not need one")
        mend = "leave out --chat, or save a template with the tokenizer" if wanted else ""
        findings.append(Finding("chat template", "fail" if wanted else "ok", says, mend))
    elif isinstance(template, str) and _GENERATION.search(template):
        findings.append(Finding("chat template", "ok", "marks what the assistant says (generation tags)"))
    else:
        says = "has no generation tags; what the assistant says is measured by templating turn by turn"
        findings.append(Finding("chat template", "ok", says))
    return findings
