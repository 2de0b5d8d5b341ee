"""From settings to what is trained on: examples in memory-mapped files, a mixture of them, or a stream."""

import hashlib
import warnings
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from polydecode.config import DataConfig
from polydecode.data.examples import Examples
from polydecode.data.lazy import Chosen, Joined, LazyExamples, content_hashes, lengths, split_held_out
from polydecode.data.mixture import Mixture
from polydecode.data.sources import Document, Source, is_held_out, mapping_of, open_sources, report_columns
from polydecode.data.streaming import ExampleStream
from polydecode.data.token_cache import CachedExamples, examples_of, tokenised
from polydecode.errors import UserError, UserNotice

HELD_OUT_SCAN = 100_000
"""Documents at the beginning of the data in which a streamed run looks for its held-out part."""


def load_examples(paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> LazyExamples:
    """All examples of `paths` (files, folders, globs, data sets) in order, numbered from 0, through the token cache.

    Raises `UserError` naming file and line.
    """
    return Joined(_load_parts(paths, tokenizer, config))


def training_data(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[Examples | ExampleStream, Examples | None]:
    """(what is trained on, the held-out examples or None) as the settings say."""
    if config.streaming:
        return _streamed(config, tokenizer, seed)
    parts = _load_parts(config.data, tokenizer, config)
    whole: LazyExamples = Joined(parts)
    indices = np.arange(len(whole))
    if config.eval_data:
        held_out = load_examples(config.eval_data, tokenizer, config)[: config.max_eval_examples]
    else:
        training, held_out = split_held_out(whole, config)
        indices = training.indices
    evaluated = Examples(held_out) if len(held_out) else None
    if not config.data_weights:
        return Examples(Chosen(whole, indices)), evaluated
    bounds = np.searchsorted(indices, np.cumsum([0, *(len(part) for part in parts)]))
    chosen = [Chosen(whole, indices[low:high]) for low, high in pairwise(bounds)]
    for name, part in zip(config.data, chosen, strict=True):
        if not len(part):
            raise UserError(f"all examples of {name!r} are held out; lower eval_fraction or give more data")
    return Mixture(chosen, config.data_weights, seed), evaluated


def data_fingerprint(training: Examples | ExampleStream) -> str:
    """What tells this training data from other data: a hash of its documents and lengths in order, or of a stream's files."""
    if isinstance(training, ExampleStream):
        return training.files
    digest = hashlib.sha256(content_hashes(training.examples).tobytes())
    digest.update(lengths(training.examples).tobytes())
    return digest.hexdigest()[:16]


def _load_parts(
    paths: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[CachedExamples]:
    """The examples of each source; ids count through all of them."""
    sources = open_sources(paths)
    report_columns(sources, mapping_of(config))
    _suggest_chat(sources, tokenizer, config)
    parts: list[CachedExamples] = []
    for source in sources:
        parts.append(tokenised(source, tokenizer, config, first_id=sum(len(part) for part in parts)))
        cut = int((parts[-1].lengths() >= config.max_length).sum())
        if cut and config.long_text == "cut":
            told = f"{source.name}: {cut} of {len(parts[-1])} examples reach max_length {config.max_length}"
            warnings.warn(f"{told}; what is beyond it is not trained on", UserNotice, stacklevel=2)
    return parts


def _suggest_chat(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    """Note that pairs are put together bare although the tokenizer has a chat template."""
    if config.chat or tokenizer.chat_template is None:
        return
    for source in sources:
        first = next(iter(source.documents(mapping_of(config))), None)
        if first is not None and "response" in first.record and "messages" not in first.record:
            told = f"{source.name}: nothing is put between prompt and response"
            warnings.warn(f"{told}; --chat puts them into the tokenizer's chat template", UserNotice, stacklevel=2)
            return


def _streamed(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[ExampleStream, Examples | None]:
    """The stream, and its held-out documents from the first part of the data (or of `eval_data`)."""
    sources = open_sources(config.data, streaming=True)
    report_columns(sources, mapping_of(config))
    _suggest_chat(sources, tokenizer, config)
    stream = ExampleStream(sources, tokenizer, config, seed)
    documents: list[Document] = []
    if config.eval_data:
        for source in open_sources(config.eval_data, streaming=True):
            documents += islice(source.documents(mapping_of(config)), config.max_eval_examples - len(documents))
    elif config.eval_fraction:
        share = -(-config.max_eval_examples // len(sources))
        for source in sources:
            documents += _first_held_out(source, config, share, HELD_OUT_SCAN // len(sources))
    examples = [e for document in documents for e in examples_of(document, tokenizer, config)][
        : config.max_eval_examples
    ]
    for i, example in enumerate(examples):
        example.example_id = i
    return stream, Examples(examples) if examples else None


def _first_held_out(source: Source, config: DataConfig, count: int, scan: int) -> list[Document]:
    first = islice(source.documents(mapping_of(config)), scan)
    return list(islice((d for d in first if is_held_out(d.content_hash, config.eval_fraction)), count))
