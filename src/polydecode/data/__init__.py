"""Training data: files to records, records to examples, examples to batches."""

from polydecode.data.chat import chat_ids, record_thinking
from polydecode.data.encode import encode, prompt_ids
from polydecode.data.examples import STREAM_PLACE, Collator, Example, Examples, pad_token_id
from polydecode.data.files import read_jsonl
from polydecode.data.lazy import content_hashes, lengths, split_held_out
from polydecode.data.loading import data_fingerprint, load_examples, training_data
from polydecode.data.mixture import Mixture
from polydecode.data.packing import PackedExamples
from polydecode.data.streaming import ExampleStream

__all__ = [
    "STREAM_PLACE",
    "Collator",
    "Example",
    "ExampleStream",
    "Examples",
    "Mixture",
    "PackedExamples",
    "chat_ids",
    "content_hashes",
    "data_fingerprint",
    "encode",
    "lengths",
    "load_examples",
    "pad_token_id",
    "prompt_ids",
    "read_jsonl",
    "record_thinking",
    "split_held_out",
    "training_data",
]
