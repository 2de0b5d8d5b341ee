"""What to know before training block diffusion on given data."""

from typing import Any

from polydecode.methods.batch import Finding
from polydecode.methods.block_diffusion.config import BlockDiffusionConfig

MANY = 0.5
"""Share of answers shorter than one block above which the block is too long for the data."""


def advise(config: BlockDiffusionConfig, answers: list[int], tokenizer: Any) -> list[Finding]:
    """The mask token's row, and the block length against the answers' lengths."""
    findings = [_mask_token(config, tokenizer)]
    if not answers:
        return findings
    block = max(config.training_block_sizes or [config.block_size])
    short = sum(n < block for n in answers) / len(answers)
    said = f"{short:.0%} of the answers are shorter than one block of {block} tokens"
    if short > MANY:
        better = max(2, sorted(answers)[len(answers) // 4])
        mend = (
            f"such an answer is one block, mostly filled up with end tokens: --block-size {better}, or longer answers"
        )
        findings.append(Finding("block size", "warn", said, mend))
    else:
        findings.append(Finding("block size", "ok", said))
    return findings


def _mask_token(config: BlockDiffusionConfig, tokenizer: Any) -> Finding:
    row = config.mask_token_id
    if row is None or tokenizer is None:
        return Finding("mask token", "ok", f"row {row} of the vocabulary")
    tokens = [token for token, number in tokenizer.get_vocab().items() if number == row]
    use = f"the tokenizer's {tokens[0]!r}" if tokens else "which the tokenizer does not use"
    return Finding("mask token", "ok", f"row {row}, {use}")
