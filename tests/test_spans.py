"""What is trained of a conversation, by the templates of four families; the goldens are for reading.

To write them anew: UPDATE_GOLDEN=1 pytest tests/test_spans.py, and read the difference.
"""

import os
from pathlib import Path

import pytest

from polydecode.config import DataConfig
from polydecode.data import Collator, chat_ids, encode, record_thinking
from polydecode.errors import UserError
from tiny import tiny_base, tiny_model
from tiny_templates import SPECIAL, family_tokenizer
from tiny_tokenizer import tiny_tokenizer

GOLDEN = Path(__file__).parent / "golden"
SYSTEM = {"role": "system", "content": "Be brief"}
USER = {"role": "user", "content": "What is two plus two"}
FOUR = {"role": "assistant", "content": "It is four"}
MORE = {"role": "user", "content": "and three plus two"}
FIVE = {"role": "assistant", "content": "Five"}
THOUGHT = {"role": "assistant", "content": "<think>\nadding up\n</think>\n\nFive"}
CASES = {
    "one turn": ([USER, FOUR], {}),
    "two turns, all trained": ([USER, FOUR, MORE, FIVE], {}),
    "two turns, the last trained": ([USER, FOUR, MORE, FIVE], {"train_on": "last_assistant"}),
    "system, one turn": ([SYSTEM, USER, FOUR], {}),
    "system, two turns, the last trained": ([SYSTEM, USER, FOUR, MORE, FIVE], {"train_on": "last_assistant"}),
    "the last turn has no answer": ([USER, FOUR, MORE], {}),
    "an empty answer": ([USER, {"role": "assistant", "content": ""}], {}),
    "thinking in the answer": ([USER, FOUR, MORE, THOUGHT], {"train_on": "last_assistant"}),
    "thinking switched off": ([USER, FOUR], {"enable_thinking": False}),
    "content in parts": (
        [USER | {"content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " two"}]}, FOUR],
        {},
    ),
}


def config(**settings):
    return DataConfig(data=["x"], **settings)


def drawn(family, messages, settings):
    """The example as lines: "given" and "TRAINED" tokens, | between them; or what the refusal says."""
    tokenizer = family_tokenizer(family)
    try:
        example = encode({"messages": messages}, tokenizer, config(**settings))
    except UserError as error:
        return [f"refused: {error}"]
    lines, before = [], None
    for token, trained in zip(example.input_ids, example.loss_mask, strict=True):
        text = tokenizer.decode([token]).replace("\n", "\\n")
        if trained != before:
            lines.append(("TRAINED  " if trained else "given    ") + text)
            before = trained
        else:
            lines[-1] += "|" + text
    return lines


@pytest.mark.parametrize("family", SPECIAL)
def test_the_trained_tokens_are_as_drawn(family):
    """Pins: a role header or a newline in the loss, an end token out of it, a turn shifted by one, a rewritten turn trained."""
    text = ""
    for name, (messages, settings) in CASES.items():
        text += "\n".join([f"# {name}", *drawn(family, messages, settings)]) + "\n\n"
    path = GOLDEN / f"spans_{family}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("family", SPECIAL)
@pytest.mark.parametrize("thinking", [None, False, True])
def test_generation_is_given_what_training_put_before_the_answer(family, thinking):
    """Pins: SpecForge#296: data templated in one thinking mode, chat in another."""
    tokenizer = family_tokenizer(family)
    for messages in ([USER, FOUR], [SYSTEM, USER, FOUR, MORE, FIVE]):
        settings = config(train_on="last_assistant", enable_thinking=thinking)
        example = encode({"messages": messages}, tokenizer, settings)
        given = chat_ids(messages[:-1], tokenizer, enable_thinking=thinking)
        assert example.input_ids[: len(given)] == given
        assert example.loss_mask == [False] * len(given) + [True] * (len(example.input_ids) - len(given))


def test_the_thinking_mode_is_kept_with_the_tokenizer(tmp_path):
    """Pins: a checkpoint trained without thinking that is asked with it, in the command line's chat."""
    from transformers import AutoTokenizer

    from polydecode.cli.generate import encode as encode_prompt

    tokenizer = AutoTokenizer.from_pretrained(_saved(family_tokenizer("qwen3"), tmp_path / "a"))
    record_thinking(tokenizer, False)
    again = AutoTokenizer.from_pretrained(_saved(tokenizer, tmp_path / "b"))
    example = encode({"messages": [USER, FOUR]}, tokenizer, config(enable_thinking=False))
    ids = encode_prompt(again, USER["content"], chat=True)[0].tolist()
    assert ids == example.input_ids[: len(ids)]
    assert "<think>\n\n</think>" in again.decode(ids)


def _saved(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([USER, {"role": "assistant", "content": [{"type": "image", "url": "x"}]}], "message 2 has a part of type 'image'"),
        ([USER, {"role": "assistant", "content": None}], "content of message 2 must be text"),
        ([USER, {"content": "a"}], "message 2 is not one"),
        ([USER, FOUR, MORE, FIVE | {"content": " "}], "assistant turn 2 of 2 is empty"),
    ],
)  # fmt: skip
def test_odd_messages_are_one_line(messages, says):
    """Pins: a traceback, or a message without its number."""
    with pytest.raises(UserError, match=says) as error:
        encode({"messages": messages}, family_tokenizer("smollm2"), config())
    assert "\n" not in str(error.value)


def test_answers_that_begin_with_a_newline_keep_the_prompt_of_generation():
    """Pins: a token over the border of header and answer, so that training sees another prompt than generation."""
    tokenizer = family_tokenizer("smollm2")
    messages = [USER, {"role": "assistant", "content": "\n\nIt is four"}]
    example = encode({"messages": messages}, tokenizer, config())
    given = chat_ids(messages[:1], tokenizer)
    assert example.input_ids[: len(given)] == given
    assert tokenizer.decode(example.input_ids[len(given) :]) == "\n\nIt is four<|im_end|>"


def test_a_cut_conversation_has_no_end_at_the_cut():
    """Pins: a false end behind a cut, and prompts at the end of a row that nothing follows."""
    tokenizer = family_tokenizer("smollm2")
    whole = encode({"messages": [USER, FOUR, MORE, FIVE]}, tokenizer, config())
    first_end = whole.loss_mask.index(True) + 4
    for length in range(whole.loss_mask.index(True) + 1, len(whole.input_ids)):
        example = encode({"messages": [USER, FOUR, MORE, FIVE]}, tokenizer, config(max_length=length))
        assert example.input_ids == whole.input_ids[: len(example.input_ids)]
        assert example.loss_mask[-1]
        ends = sum(i == 2 and t for i, t in zip(example.input_ids, example.loss_mask, strict=True))
        assert ends == (len(example.input_ids) >= first_end)


def test_block_diffusion_trains_at_most_one_block_of_end_tokens():
    """Pins: dllm#81: padding of short answers trained as end tokens, so that answers collapse; and filling behind a cut."""
    from polydecode.methods.batch import Batch
    from polydecode.ops.sampling import RowGenerators

    base = tiny_base(vocab_size=400, pad_token_id=2)
    model = tiny_model("block_diffusion", base, fill_last_block=True, mask_token_id=399)
    size, tokenizer = 4, tiny_tokenizer()
    for limit, cut in ((500, False), (30, True)):
        records = [{"prompt": "hi", "response": text} for text in ("a", "hello " * 30, "the capital")]
        examples = [encode(r, tokenizer, config(max_length=limit)) for r in records]
        batch = Batch(**Collator(2)(examples))
        noisy, _, masked, _ = model._noise(batch, RowGenerators([1, 2, 3]))
        targets = noisy.is_real & noisy.is_target & (noisy.token == 2)
        assert not (masked & ~noisy.is_real).any()
        for row, example in enumerate(examples):
            ended = not (cut and len(example.input_ids) == limit)
            assert (1 if ended else 0) <= int(targets[row].sum()) <= (size if ended else 0)


@pytest.mark.slow
def test_the_real_smollm2_template():
    """Pins: the golden's template differing from the real one in what is trained."""
    from polydecode.auto import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")
    example = encode({"messages": [USER, FOUR, MORE, FIVE]}, tokenizer, config())
    trained = [i for i, t in zip(example.input_ids, example.loss_mask, strict=True) if t]
    assert tokenizer.decode(trained) == "It is four<|im_end|>Five<|im_end|>"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == trained[-1]
    whole = tokenizer.apply_chat_template([USER, FOUR, MORE, FIVE], tokenize=False).rstrip("\n")
    assert tokenizer.decode(example.input_ids) == whole
