"""What is trained of an example, and what malformed data says."""

import json

import pytest

from polydecode.config import DataConfig
from polydecode.data import Collator, encode, load_examples, prompt_ids, read_jsonl, split_held_out
from polydecode.errors import UserError
from tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def trained_text(record, **settings):
    example = encode(record, TOKENIZER, DataConfig(data=["x"], **settings))
    return TOKENIZER.decode([i for i, t in zip(example.input_ids, example.loss_mask, strict=True) if t])


def write(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_response_and_its_end_token_are_trained():
    """Pins: the end token, equal to pad here, dropped from the loss, so the model never learns to stop."""
    assert trained_text({"prompt": "hello", "response": " Paris"}) == " Paris<|im_end|>"


def test_prompt_is_tokenised_as_generation_does():
    """Pins: training and generation tokenising the prompt differently at its border with the answer."""
    example = encode({"prompt": "hello ", "response": "Paris"}, TOKENIZER, DataConfig(data=["x"]))
    length = example.is_prompt.index(False)
    assert example.input_ids[:length] == prompt_ids("hello ", TOKENIZER) == TOKENIZER("hello ")["input_ids"]


def test_every_assistant_turn_is_trained_without_role_header_and_trailing_newline():
    """Pins: the header or the template's newline in the loss, or the boundary token missed (off by one)."""
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "two"},
    ]
    assert trained_text({"messages": messages}) == "one<|im_end|>two<|im_end|>"
    example = encode({"messages": messages}, TOKENIZER, DataConfig(data=["x"]))
    assert TOKENIZER.decode(example.input_ids) == TOKENIZER.apply_chat_template(messages, tokenize=False).rstrip("\n")


def test_chat_puts_a_pair_into_the_template():
    """Pins: --chat training on other ids than --chat generation gives."""
    example = encode({"prompt": "hi", "response": "yes"}, TOKENIZER, DataConfig(data=["x"], chat=True))
    given = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    ids = TOKENIZER(given, add_special_tokens=False)["input_ids"]
    assert example.input_ids[: len(ids)] == ids
    assert example.is_prompt == [True] * len(ids) + [False] * (len(example.input_ids) - len(ids))


def test_text_has_no_prompt_and_ends_with_the_end_token():
    """Pins: plain text taken for a prompt, or without an end."""
    example = encode({"text": "the capital"}, TOKENIZER, DataConfig(data=["x"]))
    assert not any(example.is_prompt)
    assert all(example.loss_mask)
    assert example.input_ids[-1] == TOKENIZER.eos_token_id


def test_a_cut_never_teaches_an_end():
    """Pins: truncation that appends or keeps an end token after a cut."""
    for record in ({"text": "hello " * 50}, {"prompt": "hi", "response": " hello" * 50}):
        example = encode(record, TOKENIZER, DataConfig(data=["x"], max_length=12))
        assert len(example.input_ids) == 12
        assert example.input_ids[-1] != TOKENIZER.eos_token_id


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ('{"text": "a"}\n{"text": \n', 2, "not valid JSON"),
        ('{"text": "a"}\n[1, 2]\n', 2, "must be a JSON object"),
        ('{"text": "a"}\n\n{"txt": "a"}\n', 3, "needs text"),
        ('{"prompt": "a", "response": ""}\n', 1, "non-empty"),
        ('{"prompt": "a", "response": 3}\n', 1, "non-empty string"),
        ('{"messages": "hello"}\n', 1, "messages must be"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', 1, "no assistant message"),
        (b'{"text": "a"}\n{"text": "\xff\xfe"}\n', 2, "not UTF-8"),
        ('{"prompt": "' + "hello " * 100 + '", "response": "a"}\n', 1, "max_length"),
    ],
)
def test_malformed_lines_name_file_and_line(tmp_path, content, line, says):
    """Pins: a traceback, or an error that does not say where."""
    path = write(tmp_path, content)
    with pytest.raises(UserError) as error:
        load_examples([path], TOKENIZER, DataConfig(data=["x"], max_length=50))
    assert f"data.jsonl:{line}:" in str(error.value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_refused(tmp_path, content):
    """Pins: a run that trains on nothing."""
    with pytest.raises(UserError, match="no records"):
        list(read_jsonl(write(tmp_path, content)))


def test_held_out_split_depends_on_content_not_on_order(tmp_path):
    """Pins: a split by position, which moves examples between the halves when the file is extended."""
    lines = [json.dumps({"text": f"hello {i}"}) for i in range(300)]
    config = DataConfig(data=["x"], eval_fraction=0.2)
    one = load_examples([write(tmp_path, "\n".join(lines))], TOKENIZER, config)
    other = load_examples([write(tmp_path, "\n".join(reversed(lines)))], TOKENIZER, config)
    held = [{tuple(e.input_ids) for e in split_held_out(examples, config)[1]} for examples in (one, other)]
    assert held[0] == held[1]
    assert 30 < len(held[0]) < 90


def test_collator_pads_right_and_marks_padding_by_mask():
    """Pins: padding told by the pad id, which is also the end token."""
    config = DataConfig(data=["x"])
    examples = [encode({"text": t}, TOKENIZER, config) for t in ("hello", "the capital of France is")]
    batch = Collator(TOKENIZER.pad_token_id)(examples)
    short = len(examples[0].input_ids)
    assert batch["attention_mask"][0].tolist() == [1] * short + [0] * (batch["input_ids"].shape[1] - short)
    assert batch["loss_mask"][0].sum() == short
    assert batch["input_ids"][0, short - 1] == TOKENIZER.eos_token_id
