"""What a data set is to a training run: counts, lengths, what is cut and padded, and samples of what is trained.

Legend: a document's lengths and tokens are counted whole, as they are before the cut at max_length; trained tokens are those that
are left of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from polydecode.data.encode import cut
from polydecode.data.examples import Example
from polydecode.data.packing import pack

BINS = 10


@dataclass
class DataReport:
    """`histogram`: (from, to, documents) by length, both ends included. `cut`: documents longer than max_length. `refused`:
    documents whose prompt alone reaches max_length, which training refuses. `padding` and `padding_packed`: share of padding
    in batches of `batch_size` rows, in an order shuffled by the seed."""

    documents: int
    tokens: int
    trained_tokens: int
    tokens_kept: int
    longest: int
    median_length: int
    max_length: int
    batch_size: int
    cut: int
    refused: int
    padding: float
    padding_packed: float
    rows_packed: int
    histogram: list[tuple[int, int, int]] = field(default_factory=list)
    answer_lengths: dict[str, int] = field(default_factory=dict)

    @property
    def trained_share(self) -> float:
        """Trained tokens of all tokens."""
        return self.trained_tokens / max(self.tokens, 1)


def data_report(
    examples: Sequence[Example], max_length: int, batch_size: int, seed: int, end_id: int | None
) -> DataReport:
    """The report of whole (uncut) examples, for training at `max_length` in batches of `batch_size` rows."""
    lengths = sorted(len(e.input_ids) for e in examples)
    usable = [e for e in examples if True in e.loss_mask[:max_length]]
    kept = [cut(e, max_length, end_id) for e in usable]
    kept_lengths = [len(e.input_ids) for e in kept]
    alone = pack(kept_lengths, 1, seed)  # rows of one example each, in a shuffled order
    packed = pack(kept_lengths, max_length, seed)
    answers = sorted(length for e in examples for length in _answers(e))
    return DataReport(
        documents=len(examples),
        tokens=sum(lengths),
        trained_tokens=sum(sum(e.loss_mask) for e in kept),
        tokens_kept=sum(kept_lengths),
        longest=lengths[-1],
        median_length=lengths[len(lengths) // 2],
        max_length=max_length,
        batch_size=batch_size,
        cut=sum(length > max_length for length in lengths),
        refused=len(examples) - len(usable),
        padding=_padding_share(alone, kept_lengths, batch_size),
        padding_packed=_padding_share(packed, kept_lengths, batch_size),
        rows_packed=len(packed),
        histogram=_histogram(lengths),
        answer_lengths={"count": len(answers), "median": answers[len(answers) // 2], "shortest": answers[0]},
    )


def _padding_share(rows: Sequence[Sequence[int]], lengths: Sequence[int], batch_size: int) -> float:
    """Share of padding in batches of `batch_size` rows in order, each batch as wide as its longest row."""
    widths = [sum(lengths[i] for i in row) for row in rows]
    batches = [widths[start : start + batch_size] for start in range(0, len(widths), batch_size)]
    cells = sum(max(batch) * len(batch) for batch in batches)
    return 1 - sum(widths) / cells if cells else 0.0


def _answers(example: Example) -> list[int]:
    """Lengths of the trained runs of a document."""
    runs, length = [], 0
    for trained in [*example.loss_mask, False]:
        if trained:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    return runs


def _histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    width = max(-(-(lengths[-1] - lengths[0] + 1) // BINS), 1)
    counts = Counter((n - lengths[0]) // width for n in lengths)
    first = lengths[0]
    return [(first + b * width, first + (b + 1) * width - 1, counts.get(b, 0)) for b in range(max(counts) + 1)]


def trained_runs(example: Example) -> list[tuple[list[int], bool]]:
    """The tokens in runs (token ids, are they trained)."""
    runs: list[tuple[list[int], bool]] = []
    for token, trained in zip(example.input_ids, example.loss_mask, strict=True):
        if not runs or runs[-1][1] != trained:
            runs.append(([], trained))
        runs[-1][0].append(token)
    return runs
