"""The baseline is the source model: transformers' own generate and logits, token for token."""

import pytest
import torch

from polydecode.errors import UserError
from polydecode.methods.batch import left_aligned
from polydecode.ops.sampling import RowGenerators
from tiny import (
    batch_of,
    decode,
    forced_logits,
    greedy,
    hf_greedy,
    packed_batch,
    padded,
    random_rows,
    tiny_base,
    tiny_model,
)

EXACT = 1e-10


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_is_transformers_greedy(family):
    """Bug (known fault 8): a RoPE, window, bias or qk-norm field that the sliced run does not honour."""
    settings = {
        "mistral": {"sliding_window": 3},
        "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    }
    for overrides in ({}, settings.get(family, {"tie_word_embeddings": True})):
        base = tiny_base(family, **overrides)
        model = tiny_model("autoregressive", base)
        for prompt in random_rows([1, 7], seed=1):
            ids = torch.tensor([prompt])
            assert decode(model, ids, steps=10).tolist() == hf_greedy(base, ids, 10)[:, len(prompt) :].tolist()
        ids = torch.tensor(random_rows([12, 12], seed=5))
        with torch.no_grad():
            assert (model.logits(ids) - base(ids).logits).abs().max() < EXACT


def test_scaled_rope_is_honoured():
    """Bug (known fault 8): llama-3 RoPE scaling copied into the config and ignored."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16}  # fmt: skip
    base, ids = tiny_base(rope_parameters=rope), torch.tensor(random_rows([40], seed=5))
    with torch.no_grad():
        logits = tiny_model("autoregressive", base).logits(ids)
        assert (logits - base(ids).logits).abs().max() < EXACT
        assert (logits - tiny_model("autoregressive", tiny_base()).logits(ids)).abs().max() > 1e-3


def test_cached_equals_full():
    """Bug: a key missing or read twice while the cache grows past its first size (64 slots)."""
    model = tiny_model("autoregressive", tiny_base())
    prompts, answers = random_rows([1, 9, 62, 64], seed=1), torch.tensor(random_rows([9] * 4, seed=2))
    for side in ("left", "right"):
        cached = forced_logits(model, *padded(prompts, side), answers)
        for b, prompt in enumerate(prompts):
            with torch.no_grad():
                full_TV = model.logits(torch.tensor([[*prompt, *answers[b].tolist()]]))[0]
            assert (cached[b] - full_TV[len(prompt) - 1 : len(prompt) + 8]).abs().max() < 1e-9


def test_a_padded_row_is_the_row_alone():
    """Bug (known fault 14): padding inferred from a token id; here pad and eos are one id, which the prompts hold too."""
    model = tiny_model("autoregressive", tiny_base(dtype=torch.float32, pad_token_id=2))
    rows = [[2, *p, 2, 2] for p in random_rows(range(1, 8))]
    for side in ("left", "right"):
        together = decode(model, *padded(rows, side, pad=2), steps=10)
        for b, row in enumerate(rows):
            assert decode(model, torch.tensor([row]), steps=10).tolist() == together[b : b + 1].tolist()


def test_rows_leave_and_enter():
    """Bug: a joining row's first logits are overwritten when the others step, or rows lose their order."""
    model = tiny_model("autoregressive", tiny_base())
    rows = [torch.tensor([p]) for p in random_rows([3, 70, 5])]
    alone = [decode(model, row, steps=8)[0].tolist() for row in rows]
    with torch.no_grad():
        state = model.prefill(*padded([rows[0][0].tolist(), rows[1][0].tolist()]))
        first = [model.step(state, greedy).tokens for _ in range(3)]
        state = model.join(model.keep_rows(state, torch.tensor([1])), model.prefill(rows[2]))
        second = torch.cat([model.step(state, greedy).tokens for _ in range(5)], 1)
    assert torch.cat(first, 1)[1].tolist() + second[0].tolist() == alone[1]
    assert second[1].tolist() == alone[2][:5]


def test_packed_documents_are_separate_documents():
    """Bug (known fault 18): attention or positions crossing documents; B's first token predicted from A's last."""
    prompts, answers = random_rows([3, 1, 5], seed=11), random_rows([7, 4, 9], seed=12)
    for attention, tolerance in (("sdpa", EXACT), ("eager", 1e-5)):
        for overrides in ({}, {"sliding_window": 3}):
            model = tiny_model("autoregressive", tiny_base("mistral", attention=attention, **overrides))
            packed, apart = packed_batch(prompts, answers), batch_of(prompts, answers)
            packed.loss_mask, apart.loss_mask = torch.ones_like(packed.loss_mask), apart.attention_mask.bool()
            one, three = (model.loss(batch, RowGenerators(range(3))) for batch in (packed, apart))
            assert one.num_targets == three.num_targets == 26
            assert abs(float((one.loss - three.loss).detach())) < tolerance


def test_wrapping_leaves_the_base_alone():
    """Bug: transformers' post_init re-initialises the weights of a model that is already trained."""
    base = tiny_base()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    for name in ("autoregressive", "dmtd"):
        model = tiny_model(name, base)
        assert model.base is base
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in base.parameters())
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_prompts_that_are_none_are_refused():
    """Bug: an empty prompt or a mask of another shape giving an index error deep inside, or a row of NaN."""
    ids = torch.tensor([[1, 2], [3, 4]])
    wrong = [
        (ids[:0], None),
        (ids[:, :0], None),
        (ids[0], None),
        (ids, torch.ones(2, 3)),
        (ids, torch.tensor([[1, 1], [0, 0]])),
    ]
    for input_ids, mask in wrong:
        with pytest.raises(UserError):
            tiny_model("autoregressive", tiny_base(layers=1)).prefill(input_ids, mask)


def test_left_aligned_moves_real_tokens_first():
    """Bug: padding in the middle or on either side changes the order of the real tokens, or the width stays padded."""
    rows = left_aligned(torch.tensor([[9, 9, 1, 2], [3, 9, 4, 9]]), torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0]]))
    assert rows.input_ids_BP.tolist() == [[1, 2], [3, 4]]
    assert rows.length_B.tolist() == [2, 2]
    assert rows.equal
