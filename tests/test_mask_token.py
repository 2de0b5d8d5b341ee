"""The mask token: a row that nothing else uses, made the same way every time."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from polydecode import load
from polydecode.cli import main
from polydecode.convert import convert, convert_to_folder, export_base, save_checkpoint
from polydecode.errors import UserError
from polydecode.ops.sampling import RowGenerators
from tiny import batch_of, tiny_base
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
        assert expected.shape == (1, 3, USED + 1)
        assert expected.isfinite().all()
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
    with pytest.raises(UserError, match=told) as caught:
        convert(base_of(USED), "block_diffusion", tokenizer=tiny_tokenizer(), mask_token_id=given)
    assert "\n" not in str(caught.value)


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


def test_padding_of_its_own_is_refused():
    """Bug (known fault 14): a pad token that is no end token, which only the tokenizer names, taken for the mask."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    base = base_of(len(tokenizer))
    assert base.config.pad_token_id is None
    with pytest.raises(UserError, match="pad_token_id"):
        convert(base, "block_diffusion", tokenizer=tokenizer, mask_token_id=tokenizer.pad_token_id)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_vocabulary_padded_to_a_multiple_of_64(tied, named, tmp_path):
    """Bug (known fault 2): vocab_size as it was before the rows were padded, so that shapes differ after a reload. Without a
    tokenizer nobody knows which rows are free, and one more is added."""
    base = base_of(USED, tie_word_embeddings=tied)
    base.resize_token_embeddings(USED, pad_to_multiple_of=64)
    padded = base.config.vocab_size
    assert padded % 64 == 0
    assert padded > USED
    base.save_pretrained(tmp_path / "source")
    if named:
        tiny_tokenizer().save_pretrained(tmp_path / "source")
    folder = convert_to_folder(tmp_path / "source", tmp_path / "c", "block_diffusion", {"block_size": 4})
    model = load(folder)
    rows, mask = (padded, USED) if named else (padded + 1, padded)
    assert model.config.mask_token_id == mask
    assert model.config.vocab_size == model.base.config.vocab_size == rows
    written = json.loads((folder / "config.json").read_text())
    assert written.get("vocab_size", rows) == written["base_config"]["vocab_size"] == rows
    weight, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert weight.shape[0] == head.shape[0] == rows
    assert (weight is head) == tied
    batch = batch_of([[5, 6, 7]], [[8, 9, 10, 11, 12]])
    output = model.loss(batch, RowGenerators([0]))
    assert output.loss.isfinite()
    output.loss.backward()
    with torch.no_grad():
        assert model(torch.tensor([[5, mask, 7]])).logits.shape == (1, 3, rows)


def test_a_model_in_memory_gets_its_row(tmp_path):
    """Bug: a row added to a copy: the model that was given is wrapped, and it is the one that grows."""
    base = base_of(USED)
    model = convert(base, "block_diffusion", tokenizer=tiny_tokenizer())
    assert model.base is base
    assert base.config.vocab_size == base.vocab_size == base.get_input_embeddings().weight.shape[0] == USED + 1
    again = convert(model, "block_diffusion", tokenizer=tiny_tokenizer(), mask_token_id=model.config.mask_token_id)
    assert again.base is base
    assert base.config.vocab_size == USED + 1


@pytest.mark.parametrize("options", [{}, {"threshold": 0.0}, {"steps": 2}, {"do_sample": True, "temperature": 5.0}])
@pytest.mark.parametrize("rows", [USED, USED + 20])
def test_the_mask_is_never_emitted(rows, options):
    """Bug: a mask among the generated tokens, where it is by far the likeliest one."""
    model = convert(base_of(rows), "block_diffusion", tokenizer=tiny_tokenizer(), block_size=4)
    mask = model.config.mask_token_id

    def prefer(module, inputs, logits):
        logits[..., mask] = 1e4
        return logits

    model.get_output_embeddings().register_forward_hook(prefer)
    prompt = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert (model(prompt).logits.argmax(-1) == mask).all()
    out = model.generate(prompt, max_new_tokens=24, eos_token_id=None, **options)
    assert out.shape[1] == 29
    assert not (out == mask).any()


def test_two_folders_are_the_same(tmp_path):
    """Bug: a random new row (known fault 1), seen in the bytes of two conversions, under any global seed."""
    base_of(USED).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    files = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        folder = convert_to_folder(tmp_path / "source", tmp_path / str(seed), "block_diffusion")
        files.append((folder / "model.safetensors").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("rows", "given", "told", "added"),
    [
        (USED, None, f"--mask-token-id {USED} is a new row of the vocabulary", 1),
        (USED + 20, None, f"--mask-token-id {USED} is a row that the tokenizer leaves free", 0),
        (USED + 20, USED + 7, f"--mask-token-id {USED + 7} is a row that the tokenizer leaves free", 0),
        (USED, 40, "--mask-token-id 40 is the tokenizer's ", 0),
    ],
)
def test_convert_tells_which_row_it_chose(rows, given, told, added, tmp_path, capsys):
    """Bug (known fault 1): a mask token chosen in silence; or the settings asked for told instead of those written."""
    base_of(rows).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    words = ["--method", "block_diffusion", *([] if given is None else ["--mask-token-id", str(given)])]
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "text"), *words]) == 0
    assert told in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "c"), *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    chosen = report["settings"]["mask_token_id"]
    assert chosen == load(tmp_path / "c").config.mask_token_id
    assert (report["added_rows"], report["settings"]["block_size"]) == (added, load(tmp_path / "c").config.block_size)
    assert f"--mask-token-id {chosen} is {report['token_rows']['mask_token_id']}".startswith(told)


def test_convert_has_nothing_to_tell_of_a_method_without_a_mask(tmp_path, capsys):
    """Bug: a line about rows of the vocabulary for a method that needs none."""
    base_of(USED).save_pretrained(tmp_path / "source")
    words = ["convert", str(tmp_path / "source"), str(tmp_path / "c"), "--method", "dmtd", "--num-decoding-layers", "2"]
    assert main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_two_conversions_are_the_same():
    """Bug: a random new row, so that an adapter meets another model than the one it was trained on."""
    first, second = (convert(base_of(USED), "block_diffusion", tokenizer=tiny_tokenizer()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
