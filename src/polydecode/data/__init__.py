"""Training data: files to records, records to examples, examples to batches."""

from polydecode.data.encode import encode, prompt_ids
from polydecode.data.examples import Collator, Example, Examples, pad_token_id, split_held_out
from polydecode.data.files import load_examples, read_jsonl
from polydecode.data.packing import PackedExamples

__all__ = [
    "Collator",
    "Example",
    "Examples",
    "PackedExamples",
    "encode",
    "load_examples",
    "pad_token_id",
    "prompt_ids",
    "read_jsonl",
    "split_held_out",
]
