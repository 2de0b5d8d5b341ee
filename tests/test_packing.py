"""Packed rows give what their documents give alone: logits, losses, noise, gradients; and packing itself."""

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polydecode.config import TrainConfig
from polydecode.data import Collator, Example
from polydecode.data.packing import pack
from polydecode.methods import method_names
from polydecode.methods.batch import Batch
from polydecode.ops.sampling import RowGenerators
from polydecode.train import train
from polydecode.train.source import Source
from test_train_resume import data, make_checkpoint
from tiny import SETTINGS, tiny_base, tiny_model

__all__ = ["data"]
FLOAT64 = 1e-9


def make_examples(seed: int, count: int = 5) -> list[Example]:
    """Prompts and answers, texts, a conversation of two turns; uneven lengths."""
    rng = random.Random(seed)
    examples = []
    for i in range(count):
        ids = [rng.randrange(3, 60) for _ in range(rng.randrange(3, 14))] + [2]
        prompt = 0 if i % 3 == 1 else rng.randrange(1, len(ids) - 1)
        is_prompt = [t < prompt for t in range(len(ids))]
        if i == 3 and len(ids) > 6:
            is_prompt[4] = True
        examples.append(Example(ids, is_prompt, [not p for p in is_prompt], example_id=10 + i))
    return examples


def batch_and_noise(rows) -> tuple[Batch, RowGenerators]:
    batch = Batch(**Collator(0)(rows))
    return batch, RowGenerators([i for i in batch.example_ids.flatten().tolist() if i >= 0])


def models():
    wider = {"dmtd": {"training_cycle_lengths": [1, 2, 3]}, "block_diffusion": {"training_block_sizes": [2, 3, 5]}}
    for method in method_names():
        yield method, {}
        if method in wider:
            yield method, wider[method]
    yield "block_diffusion", {"noise_draws": 3, "fill_last_block": True}
    yield "block_diffusion", {"attention": "noisy_context", "token_shift": True}
    yield "dmtd", {"prompt_gate": "cyclic"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("method", "settings"), list(models()))
def test_packed_equals_separate(method, settings, implementation):
    """Pins: silent attention across documents, positions, cycles or blocks that run on, noise that belongs to the row (known
    faults 18, 20, 73). Loss, targets and gradients, in float64."""
    examples = make_examples(0)
    rows = [examples[:3], examples[3:]]
    found = []
    for given_rows in (rows, examples):
        base = tiny_base(attention=implementation)
        model = tiny_model(method, base, **(SETTINGS.get(method, {}) | settings)).train()
        batch, noise = batch_and_noise(given_rows)
        output = model.loss(batch, noise)
        output.loss.backward()
        assert output.num_targets == model.num_targets(*batch_and_noise(given_rows))
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((float(output.loss.detach()), output.num_targets, output.sums, gradients))
    (loss, targets, sums, gradients), (loss_apart, targets_apart, sums_apart, gradients_apart) = found
    assert targets == targets_apart > 0
    tolerance = FLOAT64 if implementation == "sdpa" else 1e-5  # transformers' eager softmax is float32
    assert loss == pytest.approx(loss_apart, abs=tolerance)
    assert sums == pytest.approx(sums_apart, abs=1e-4)
    assert (gradients - gradients_apart).abs().max() < tolerance


@pytest.mark.parametrize("method", method_names())
def test_packed_equals_separate_beside_a_source(method):
    """Pins: a source that reads across documents, or says what it says of another document's token."""
    settings = TrainConfig(distill_weight=0.6, distill_top_k=5, distill_temperature=1.5)
    source = Source(tiny_base(seed=7), None, settings)
    examples = make_examples(4)
    found = []
    for rows in ([examples[:3], examples[3:]], examples):
        model = tiny_model(method, **SETTINGS.get(method, {})).train()
        batch, noise = batch_and_noise(rows)
        batch.source = source.read(batch)
        output = model.loss(batch, noise)
        output.loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((float(output.loss.detach()), output.sums["source_kl"], gradients))
    (loss, kl, gradients), (loss_apart, kl_apart, gradients_apart) = found
    assert kl == pytest.approx(kl_apart, abs=1e-6)
    assert kl > 0.01
    assert loss == pytest.approx(loss_apart, abs=FLOAT64)
    assert (gradients - gradients_apart).abs().max() < FLOAT64


@pytest.mark.parametrize("method", method_names())
def test_packed_hidden_states_and_scores_equal_separate(method):
    """Pins: the same for the verbs that take no noise."""
    model = tiny_model(method, **SETTINGS.get(method, {}))
    examples = make_examples(1)
    packed, apart = batch_and_noise([examples])[0], batch_and_noise(examples)[0]
    with torch.no_grad():
        together, separate = model.hidden(packed)[0], model.hidden(apart)
        start = 0
        for b, example in enumerate(examples):
            length = len(example.input_ids)
            assert (together[start : start + length] - separate[b, :length]).abs().max() < FLOAT64
            start += length
        whole, parts = model.score(packed).log_likelihood.sum(), model.score(apart).log_likelihood.sum()
    assert float(whole) == pytest.approx(float(parts), abs=1e-8)


def test_neighbours_change_nothing():
    """Pins: a document that reads its neighbour: other tokens there must leave its loss as it is."""
    for method in method_names():
        model = tiny_model(method, **SETTINGS.get(method, {}))
        a, b, c = make_examples(2, 3)
        other = Example([5] * len(a.input_ids), a.is_prompt, a.loss_mask, a.example_id)
        c_only = [False] * len(c.input_ids)
        quiet = [Example(e.input_ids, e.is_prompt, [False] * len(e.input_ids), e.example_id) for e in (a, other)]
        last = Example(c.input_ids, c.is_prompt, c_only, c.example_id)
        with torch.no_grad():
            losses = [float(model.loss(*batch_and_noise([[first, b, last]])).loss) for first in quiet]
        assert losses[0] == pytest.approx(losses[1], abs=FLOAT64), method


def test_what_a_packed_batch_looks_like():
    """Pins: document ids, padding as a document of its own, positions that restart, documents counted through the batch."""
    one = Example([5, 6, 7], [True, False, False], [False, True, True], 3)
    two = Example([8, 9], [False, False], [True, True], 4)
    batch = Batch(**Collator(0)([[one, two], [two]]))
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [8, 9, 0, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 2, 2, 2]]
    assert batch.position_ids().tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert batch.document_numbers().tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]
    assert batch.example_ids.tolist() == [[3, 4], [4, -1]]
    assert batch.num_documents() == 3


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(1, 40), st.integers(0, 5))
def test_packing_uses_every_example_once_and_fits(lengths, max_length, seed):
    """Pins: an example lost, doubled, or a row too long."""
    rows = pack(lengths, max_length, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= max_length for row in rows)
    assert rows == pack(lengths, max_length, seed)


def test_packing_leaves_little_room():
    """Pins: a packing worse than filling in order."""
    rng = random.Random(0)
    lengths = [min(max(int(rng.lognormvariate(4.5, 0.9)), 4), 1024) for _ in range(5000)]
    rows = pack(lengths, 1024, 0)
    assert sum(lengths) / (len(rows) * 1024) > 0.97


def test_training_with_packing(tmp_path, data):
    """Pins: a packed run whose epoch is not all examples once, or that ends without a checkpoint."""
    out = tmp_path / "out"
    for method in ("dmtd", "block_diffusion"):
        settings = TrainConfig(
            checkpoint=str(make_checkpoint(tmp_path / method, method)), out=str(out / method), data=[data], packing=True,
            max_length=128, batch_size=2, epochs=1, eval_fraction=0.0, log_steps=1, report_to="none", learning_rate=1e-3,
        )  # fmt: skip
        metrics = train(settings)
        apart = train(
            TrainConfig(**(vars(settings) | {"packing": False, "batch_size": 29, "out": str(out / f"{method}-apart")}))
        )
        assert metrics["tokens"] == apart["tokens"]
        assert metrics["steps"] < 15
        logs = [json.loads((out / n / "training_metrics.json").read_text())["log"] for n in (method, f"{method}-apart")]
        assert logs[0][0]["loss"] > 0
