"""What to know before training DMTD on given data."""

from polydecode.methods.batch import Finding
from polydecode.methods.dmtd.config import DMTDConfig

MANY = 0.5
"""Share of answers shorter than one cycle above which the cycle gains little."""


def advise(config: DMTDConfig, answers: list[int]) -> list[Finding]:
    """The cycle length against the answers' lengths."""
    if not answers:
        return []
    cycle = max(config.training_cycle_lengths or [config.cycle_length])
    short = sum(n < cycle for n in answers) / len(answers)
    said = f"{short:.0%} of the answers are shorter than one cycle of {cycle} tokens"
    if short <= MANY:
        return [Finding("cycle length", "ok", said)]
    return [
        Finding("cycle length", "warn", said, "late places of the cycle are hardly trained: a shorter --cycle-length")
    ]
