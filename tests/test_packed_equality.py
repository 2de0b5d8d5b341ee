"""A packed row against its documents alone, for every method: each target's logits, the losses, the draws, the gradients."""

import pytest
import torch

from polydecode.data import Collator, Example
from polydecode.methods import method_names
from polydecode.methods.batch import Batch
from polydecode.ops.sampling import RowGenerators, mix_seed
from tiny import random_rows, tiny_base, tiny_model

EXACT = 1e-9
"""Relative float64 tolerance: the same sums in another order."""
ROUNDED = 1e-5
"""The same in float32."""
EAGER = 1e-4
"""Absolute, also in float64: transformers' eager attention takes its softmax in float32. A wrong mask is off by about 1."""
VARIANTS = [(name, {}) for name in method_names()] + [
    ("dmtd", {"training_cycle_lengths": [2, 3, 4]}),
    ("dmtd", {"prompt_gate": "cyclic", "merge": "add", "num_encoding_layers": 1}),
    ("block_diffusion", {"training_block_sizes": [2, 4, 8], "fill_last_block": True}),
    ("block_diffusion", {"noise_draws": 2, "half_life_ratio": None}),
    ("block_diffusion", {"token_shift": True, "prompt_attention": "bidirectional"}),
    ("block_diffusion", {"attention": "noisy_context"}),
    ("block_diffusion", {"attention": "bidirectional"}),
]


def document(number, prompt, answer):
    """A document with `prompt` given tokens and `answer` trained ones, the last the end token."""
    ids = random_rows([prompt + answer], seed=number, low=3, high=59)[0]
    ids[-1] = 2
    is_prompt = [i < prompt for i in range(len(ids))]
    return Example(ids, is_prompt, [not p for p in is_prompt], example_id=number)


def turns(number):
    """A document with two answers."""
    one, two = document(number, 3, 4), document(number + 100, 2, 5)
    return Example(one.input_ids + two.input_ids, one.is_prompt + two.is_prompt, one.loss_mask + two.loss_mask, number)


DOCUMENTS = [document(5, 3, 7), document(2, 0, 6), turns(9), document(7, 6, 1), document(11, 0, 10), document(4, 2, 5)]
ROWS = [DOCUMENTS[:3], DOCUMENTS[3:5], DOCUMENTS[5:]]


def batch_and_noise(examples, epoch=0):
    batch = Batch(**Collator(2)(examples))
    examples = [i for i in batch.example_ids.flatten().tolist() if i >= 0]
    return batch, RowGenerators([mix_seed(1, epoch, i) for i in examples])


def token_losses(model, examples, monkeypatch):
    """(loss output, {(example, target): losses and logits}) by catching what the method hands to the cross-entropy."""
    from polydecode.ops import distillation as module  # where every method's losses are made

    original, caught = module.token_cross_entropy, []

    def catching(hidden_ND, target_N, head, **more):
        caught.append((head(hidden_ND).detach(), target_N))
        return original(hidden_ND, target_N, head, **more)

    monkeypatch.setattr(module, "token_cross_entropy", catching)
    output = model.loss(*batch_and_noise(examples))
    monkeypatch.setattr(module, "token_cross_entropy", original)
    return output, caught[0]


@pytest.mark.parametrize(("method", "settings"), VARIANTS, ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_are_separate_documents(method, settings, attention, monkeypatch):
    """Pins: LlamaFactory#2289, unturtle#60, NeMo#3149: attention, positions, phases, blocks or noise that reach over the
    border of two packed documents, in the logits, the losses and the gradients."""
    model = tiny_model(method, tiny_base(attention=attention), **settings).train()
    packed, (logits, targets) = token_losses(model, ROWS, monkeypatch)
    exact = attention == "sdpa"
    packed.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    total, count, found_logits, found_targets = 0.0, 0, [], []
    for example in DOCUMENTS:
        one, (logits_one, targets_one) = token_losses(model, [example], monkeypatch)
        total, count = total + one.loss * one.num_targets, count + one.num_targets
        found_logits.append(logits_one)
        found_targets.append(targets_one)
        assert one.num_targets == model.num_targets(*batch_and_noise([example]))
    alone = total / count
    alone.backward()
    assert packed.num_targets == count == model.num_targets(*batch_and_noise(ROWS))
    assert packed.loss.item() == pytest.approx(alone.item(), rel=EXACT if exact else 1e-6)
    if settings.get("noise_draws", 1) == 1:  # several draws stand side by side in a row, so in another order
        assert torch.equal(targets, torch.cat(found_targets))
        torch.testing.assert_close(logits, torch.cat(found_logits), rtol=EXACT, atol=EXACT if exact else EAGER)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-7, atol=1e-8 if exact else EAGER)


@pytest.mark.parametrize("method", method_names())
def test_packed_logits_in_float32(method, monkeypatch):
    """Pins: a packed row that is right in float64 alone."""
    model = tiny_model(method, tiny_base(dtype=torch.float32, initializer_range=0.05))
    with torch.no_grad():
        _, (packed, _) = token_losses(model, [DOCUMENTS], monkeypatch)
        apart = torch.cat([token_losses(model, [e], monkeypatch)[1][0] for e in DOCUMENTS])
    assert float((packed - apart).abs().max()) < ROUNDED * max(1.0, float(apart.abs().max()))
