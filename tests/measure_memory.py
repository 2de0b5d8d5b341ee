"""Peak resident memory of one job, in a process of its own: `python measure_memory.py JOB JSON` prints a JSON line.

`loss`: naive full logits or a method's own loss at a large vocabulary, forward and backward. `run`: a few training steps of a
random llama, with the estimate made before them.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from polydecode.config import TrainConfig
from polydecode.data import Examples
from polydecode.methods import get_method
from polydecode.methods.batch import Batch
from polydecode.ops.sampling import RowGenerators
from tiny_tokenizer import tiny_tokenizer


def peak() -> int:
    """This program's own peak. (`ru_maxrss` also counts that of the process it was forked from.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def llama(vocab: int, width: int, layers: int):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=int(2.75 * width),
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


def loss(method: str, settings: dict, vocab: int, tokens: int) -> dict:
    """How much the peak rises over that of the model: `method` "naive" is the model's own loss over full logits."""
    base = llama(vocab, 256, 1)
    ids = torch.randint(0, vocab, (1, tokens))
    everything = torch.ones_like(ids)
    if method == "naive":
        before = peak()
        base(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {"rise": peak() - before}
    model = get_method(method)[1].from_base(base, **settings)
    batch = Batch(
        ids, everything, torch.zeros_like(ids, dtype=torch.bool), everything.bool(), example_ids=torch.zeros(1)
    )
    before = peak()
    model.train().loss(batch, RowGenerators([0])).loss.backward()
    return {"rise": peak() - before}


def run(method: str, settings: dict, size: list[int], prompt: int, answer: int, **changes) -> dict:
    """Estimate and peak of three training steps; `size`: vocabulary, width, layers."""
    from polydecode.benchmark.training import random_examples
    from polydecode.train import DecoderTrainer, prepare_parameters
    from polydecode.train.memory import estimate_memory, lengths_of

    model = get_method(method)[1].from_base(llama(*size), **settings)
    with tempfile.TemporaryDirectory() as folder:
        told = {"batch_size": 4, "max_steps": 3, "report_to": "none", "learning_rate": 1e-6} | changes
        config = TrainConfig(checkpoint="-", out=f"{folder}/out", data=["-"], **told)
        prepare_parameters(model, config)
        examples = random_examples(model, 12, prompt, answer, 0)
        estimate = estimate_memory(model, config, lengths_of(examples))
        DecoderTrainer(model, config, Examples(examples), None, tiny_tokenizer()).train()
    return {"estimate": estimate.total, "peak": peak()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"loss": loss, "run": run}[sys.argv[1]](**json.loads(sys.argv[2]))))
