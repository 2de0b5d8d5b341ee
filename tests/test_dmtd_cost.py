"""Predicted cost against the paper's PLT table, and measured cost against the prediction."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from polydecode.methods import get_method
from polydecode.methods.base import ParallelDecoder
from tiny import greedy, padded, random_rows, tiny_base, tiny_config, tiny_model


def on_paper(layers: int, decoding: int = 8, **shape) -> ParallelDecoder:
    """A dmtd model without weights."""
    config_class, model_class = get_method("dmtd")
    config = tiny_config("qwen3", layers, **shape)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
        return model_class(config_class(base_config=config, num_decoding_layers=decoding), base)


PLT = {2: 0.611, 3: 0.481, 4: 0.417, 6: 0.352}
"""36 layers, 8 of them decoding: share of the layers run per token, by cycle length."""

SPEEDUP = {
    (36, 8): (1.64, 2.08, 2.40, 2.84),
    (28, 8): (1.56, 1.91, 2.15, 2.47),
    (40, 8): (1.67, 2.14, 2.50, 3.00),
    (64, 8): (1.78, 2.40, 2.91, 3.69),
    (36, 16): (1.38, 1.59, 1.71, 1.86),
    (36, 4): (1.80, 2.45, 3.00, 3.86),
}
"""1 / PLT for cycle lengths 2, 3, 4, 6, by (layers, decoding layers)."""


def test_cost_is_the_papers_plt():
    """Bug: a head counted as cycle_length forwards, or the last of the cycle's tokens left out."""
    model = on_paper(36)
    for cycle_length, plt in PLT.items():
        assert model.forwards_per_token(cycle_length=cycle_length) == pytest.approx(plt, abs=5e-4)
    assert model.forwards_per_token(cycle_length=1) == 1
    for (layers, decoding), speedups in SPEEDUP.items():
        model = on_paper(layers, decoding)
        for cycle_length, speedup in zip((2, 3, 4, 6), speedups, strict=True):
            assert 1 / model.forwards_per_token(cycle_length=cycle_length) == pytest.approx(speedup, abs=5.1e-3)


def test_encoding_layers_run_for_every_token():
    """Bug: encoding layers counted with the thinking layers."""
    config_class, model_class = get_method("dmtd")
    config = tiny_config(layers=10)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
        model = model_class(config_class(base_config=config, num_decoding_layers=2, num_encoding_layers=3), base)
    assert model.forwards_per_token(cycle_length=4) == pytest.approx((10 + 3 * 5) / 40)


def test_the_head_is_counted_when_asked():
    """Bug: speed predicted without the head, which is nearly 4 layers of Qwen3-4B and most of the gap to measured speed."""
    shape = {"hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    model = on_paper(36, **shape)
    for cycle_length, speedup in {2: 1.54, 3: 1.88, 4: 2.11, 6: 2.41}.items():
        found = 1 / model.forwards_per_token(count_head=True, cycle_length=cycle_length)
        assert found == pytest.approx(speedup, abs=5.1e-3)


def test_measured_cost_is_the_predicted_one():
    """Bug: `forwards` of a step and `forwards_per_token` disagree, so a benchmark compares two different things."""
    base = tiny_base()
    prompts = torch.tensor(random_rows([3, 3]))
    for encoding in (0, 2):
        for gate in ("full", "cyclic"):
            for cycle_length in (1, 2, 3, 5):
                model = tiny_model("dmtd", base, num_encoding_layers=encoding, prompt_gate=gate)
                with torch.no_grad():
                    state = model.prefill(prompts, cycle_length=cycle_length)
                    assert model.step(state, greedy).forwards == 0, "the first step uses the prefill's logits"
                    cost = sum(model.step(state, greedy).forwards for _ in range(3 * cycle_length))
                assert cost / (3 * cycle_length) == pytest.approx(model.forwards_per_token(cycle_length=cycle_length))
    base_cost = tiny_model("autoregressive", base)
    assert base_cost.forwards_per_token() == 1


def test_rows_out_of_phase_cost_what_they_cost():
    """Bug: a batch whose rows head at different steps reported at the price of one row; thinking is read more often."""
    model = tiny_model("dmtd", tiny_base(), cycle_length=3)
    with torch.no_grad():
        state = model.prefill(*padded(random_rows([3, 4])), cycle_length=[2, 3])
        costs = [model.step(state, greedy).forwards for _ in range(7)]
    heads = [read % 2 == 0 or read % 3 == 0 for read in range(1, 7)]
    assert costs == pytest.approx([0.0] + [1.0 if head else 2 / 5 for head in heads])
