"""Findings about the examples."""

from collections import Counter
from collections.abc import Sequence

from polydecode.config import TrainConfig
from polydecode.data import Example
from polydecode.methods.base import ParallelDecoder
from polydecode.methods.batch import Finding

MANY_DUPLICATES = 0.05
MANY_CUT = 0.1


def data_findings(examples: Sequence[Example]) -> list[Finding]:
    """Counts, the trained share, duplicates, and answers that are empty but for the end token."""
    tokens = sum(len(e.input_ids) for e in examples)
    trained = sum(sum(e.loss_mask) for e in examples)
    says = f"{len(examples):,} examples, {tokens:,} tokens, {trained / max(tokens, 1):.0%} of them trained"
    findings = [Finding("data", "ok", says)]
    counts = Counter(hash(tuple(e.input_ids)) for e in examples)
    repeated = len(examples) - len(counts)
    share = repeated / max(len(examples), 1)
    says = f"{repeated:,} of {len(examples):,} examples repeat another one"
    if share > MANY_DUPLICATES:
        findings.append(
            Finding("duplicates", "warn", says, "remove them: they are learned by heart, and leak nothing new")
        )
    else:
        findings.append(Finding("duplicates", "ok", says))
    empty = [e.example_id for e in examples if sum(e.loss_mask) <= 1]
    if empty:
        says = f"{len(empty):,} examples train one token or none (the first is number {empty[0] + 1})"
        findings.append(Finding("empty answers", "warn", says, "remove them: they teach to answer with the end token"))
    return findings


def length_findings(model: ParallelDecoder, examples: Sequence[Example], config: TrainConfig) -> list[Finding]:
    """The longest example against `max_length` and the model's context."""
    context = model.config.max_position_embeddings
    if config.max_length > context:
        says = f"max_length is {config.max_length}, the model's context {context}"
        return [Finding("context length", "fail", says, f"--max-length {context}")]
    if not examples:
        return [Finding("context length", "ok", f"{context}; examples are cut at {config.max_length}")]
    lengths = [len(e.input_ids) for e in examples]
    full = sum(n >= config.max_length for n in lengths) / len(lengths)
    says = f"the longest example has {max(lengths)} tokens, the context {context}; {full:.0%} reach {config.max_length}"
    if full > MANY_CUT:
        return [
            Finding("context length", "warn", says, f"a longer --max-length (up to {context}), or shorter documents")
        ]
    return [Finding("context length", "ok", says)]
