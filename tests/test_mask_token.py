"""The mask token: a row that nothing else uses, made the same way every time."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from polydecode import load
from polydecode.convert import convert, export_base, save_checkpoint
from polydecode.errors import UserError
from tiny import tiny_base
from tiny_tokenizer import tiny_tokenizer

USED = len(tiny_tokenizer())


def base_of(rows: int, **overrides):
    return tiny_base(dtype=torch.float32, vocab_size=rows, **overrides)


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_vocabulary_gets_one_more_row(tied, tmp_path):
    """Bugs (known faults 1, 2, 4): a mask id outside the embedding; a stale vocab_size; a tied head that comes loose."""
    base = base_of(USED, tie_word_embeddings=tied)
    old = base.get_input_embeddings().weight.detach().clone()
    model = convert(base, "block_diffusion", tokenizer=tiny_tokenizer(), block_size=4)
    assert model.config.mask_token_id == USED
    assert model.config.vocab_size == model.base.config.vocab_size == USED + 1
    weight, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert weight.shape[0] == head.shape[0] == USED + 1
    assert (weight is head) == tied
    assert torch.equal(weight[:USED], old)
    assert (weight[USED] - old.mean(0)).abs().max() < 1e-6
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "c")
    again = load(tmp_path / "c")
    assert again.config.vocab_size == USED + 1
    ids = torch.tensor([[5, USED, 7]])
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(again(ids).logits, expected)
        plain = AutoModelForCausalLM.from_pretrained(export_base(tmp_path / "c", tmp_path / "plain"))
        assert plain(ids).logits.shape == (1, 3, USED + 1)
    assert (plain.get_output_embeddings().weight is plain.get_input_embeddings().weight) == tied


def test_a_free_row_is_used():
    """Bug: a row added although the tokenizer leaves some (Qwen3: 151,669 of 151,936)."""
    base = base_of(USED + 20)
    model = convert(base, "block_diffusion", tokenizer=tiny_tokenizer())
    assert model.config.mask_token_id == USED
    assert model.config.vocab_size == USED + 20


def test_the_tokenizers_own_mask_token_is_used():
    """Bug: a second mask token beside the one that is there."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    model = convert(base_of(USED + 20), "block_diffusion", tokenizer=tokenizer)
    assert model.config.mask_token_id == tokenizer.mask_token_id


@pytest.mark.parametrize(
    ("given", "told"),
    [(1, "bos_token_id"), (2, "eos_token_id"), (USED + 1, "would be a new one"), (-3, "0 or more"), (True, "type")],
)
def test_ids_with_another_use_are_refused(given, told):
    """Bug (known fault 14): pad, start, end or a turn's marker taken for the mask, so that real text is read as unknown."""
    with pytest.raises(UserError, match=told):
        convert(base_of(USED), "block_diffusion", tokenizer=tiny_tokenizer(), mask_token_id=given)


def test_a_tokens_place_in_the_template_is_refused():
    """Bug: a marker that the chat template writes, known to no special-token field."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "<spare>"]})
    tokenizer.chat_template = "<turn>" + tokenizer.chat_template
    turn, spare = tokenizer.convert_tokens_to_ids(["<turn>", "<spare>"])
    with pytest.raises(UserError, match="chat template"):
        convert(base_of(len(tokenizer)), "block_diffusion", tokenizer=tokenizer, mask_token_id=turn)
    model = convert(base_of(len(tokenizer)), "block_diffusion", tokenizer=tokenizer, mask_token_id=spare)
    assert model.config.vocab_size == len(tokenizer)


def test_two_conversions_are_the_same():
    """Bug: a random new row, so that an adapter meets another model than the one it was trained on."""
    first, second = (convert(base_of(USED), "block_diffusion", tokenizer=tiny_tokenizer()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
