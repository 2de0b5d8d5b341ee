"""The decode loop: like transformers where they overlap, one loop for every method."""

import shutil

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from polydecode.convert import convert
from polydecode.errors import UserError
from polydecode.ops import native
from polydecode.ops.linear import few_rows_product
from tiny import tiny_base
from tiny_tokenizer import tiny_tokenizer

METHODS = {"autoregressive": {}, "dmtd": {"cycle_length": 3, "num_decoding_layers": 2}}
PROMPT = torch.tensor([[5, 9, 2, 33, 17]])


@pytest.fixture(scope="module")
def base():
    return tiny_base(dtype=torch.float32, vocab_size=300)


@pytest.fixture(params=list(METHODS))
def model(request, base):
    return convert(base, method=request.param, **METHODS[request.param])


def plain(model, prompt=PROMPT, **settings):
    return model.generate(prompt, **({"max_new_tokens": 11, "do_sample": False, "eos_token_id": None} | settings))


def test_autoregressive_equals_transformers(base):
    """Pins: any difference from transformers' greedy generate, padded batch and repetition penalty included."""
    model = convert(base, method="autoregressive")
    prompts = torch.tensor([[0, 0, 5, 9, 2], [7, 8, 9, 10, 11]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for extra in ({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}):
        expected = base.generate(prompts, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0,
                                 eos_token_id=None, **extra)  # fmt: skip
        actual = model.generate(prompts, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None,
                                pad_token_id=0, **extra)  # fmt: skip
        if not extra:
            assert torch.equal(actual, expected)
        else:  # transformers shows processors the padding too; rows without padding must agree
            assert torch.equal(actual[1], expected[1])


def test_transformers_stopping_matches(base):
    """Pins: the end token dropped or doubled, rows not padded after their end."""
    model = convert(base, method="autoregressive")
    eos = [int(plain(model)[0, -4]), 3]
    prompts = torch.tensor([[5, 9, 2, 33, 17], [7, 8, 9, 10, 11]])
    expected = base.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=11, do_sample=False,
                             eos_token_id=eos, pad_token_id=0)  # fmt: skip
    assert torch.equal(
        model.generate(prompts, max_new_tokens=11, do_sample=False, eos_token_id=eos, pad_token_id=0), expected
    )


def test_end_token_anywhere_in_a_cycle_ends_the_row(model):
    """Pins: tokens after the end token, at whatever place of a cycle it comes."""
    whole = plain(model)[0, PROMPT.shape[1] :].tolist()
    for place, token in enumerate(whole):
        out = plain(model, eos_token_id=token)[0, PROMPT.shape[1] :].tolist()
        assert out == whole[: whole.index(token) + 1]
        assert place >= whole.index(token)


def test_new_tokens_are_a_prefix_of_more_new_tokens(model):
    """Pins: max_new_tokens that must be a multiple of something, or that changes what comes before."""
    long = plain(model, max_new_tokens=13)
    for n in range(14):
        assert torch.equal(plain(model, max_new_tokens=n), long[:, : PROMPT.shape[1] + n])


def test_counts_are_told(model):
    """Pins: forwards that are not those run, prompt tokens counted as new."""
    out = plain(model, return_dict_in_generate=True, max_new_tokens=9)
    assert out.num_new_tokens == [9]
    assert out.finish_reason == ["length"]
    assert out.forwards == pytest.approx(9 * model.forwards_per_token())
    assert 0 < out.ttft_s <= out.elapsed_s


def test_rows_finish_on_their_own(model):
    """Pins: a row that leaves the batch changing what the others get."""
    prompts = torch.tensor([[5, 9, 2, 33, 17], [7, 8, 9, 10, 11], [1, 1, 40, 41, 42]])
    alone = [plain(model, prompts[b : b + 1])[0, 5:].tolist() for b in range(3)]
    eos = alone[1][3]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in alone]
    out = plain(model, prompts, eos_token_id=eos, return_dict_in_generate=True)
    for b in range(3):
        assert out.sequences[b, 5:].tolist()[: out.num_new_tokens[b]] == expected[b]
    assert out.finish_reason[1] == "stop"


def test_sampling_is_seeded_per_row(model):
    """Pins: only row 0 sampled, one generator for the batch, a seed that does not reproduce."""
    settings = {"do_sample": True, "temperature": 1.5, "seed": 7}
    three = PROMPT.repeat(3, 1)
    out = plain(model, three, **settings)
    assert torch.equal(out, plain(model, three, **settings))
    assert torch.equal(out[:1], plain(model, **settings))
    assert len({tuple(row.tolist()) for row in out}) == 3
    assert not torch.equal(out[:1], plain(model, do_sample=True, temperature=1.5, seed=8))


@pytest.mark.parametrize("extreme", [{"temperature": 0.0}, {"temperature": 1e-8}, {"top_p": 0.0}, {"top_k": 1}])
def test_extreme_sampling_is_greedy(model, extreme):
    """Pins: division by zero, NaN, or noise where the distribution has one point."""
    assert torch.equal(plain(model, do_sample=True, seed=1, **extreme), plain(model))


@pytest.mark.parametrize("wide", [{"top_k": 10_000}, {"top_p": 1.0}, {"temperature": 2.0}, {"min_p": 1.0}])
def test_wide_sampling_runs(model, wide):
    """Pins: a crash at the other end of the range."""
    assert plain(model, do_sample=True, seed=1, **wide).shape == (1, 16)


def test_stop_strings_and_criteria(model):
    """Pins: stop strings ignored, or matched in the prompt; a stopping criterion that is never asked."""
    tokenizer = tiny_tokenizer()
    whole = plain(model, max_new_tokens=40)[0, PROMPT.shape[1] :].tolist()
    texts = [tokenizer.decode([t]) for t in whole]
    place, text = next((i, t) for i, t in enumerate(texts) if t.isascii() and t.isprintable() and len(t) == 1)
    out = plain(model, stop_strings=[text], tokenizer=tokenizer, return_dict_in_generate=True, max_new_tokens=40)
    assert out.num_new_tokens == [place + 1]
    assert out.finish_reason == ["stop"]

    class AfterTwo(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= PROMPT.shape[1] + 2)

    assert plain(model, stopping_criteria=StoppingCriteriaList([AfterTwo()])).shape[1] == PROMPT.shape[1] + 2


def test_streamer_gets_the_prompt_then_what_generate_returns(model):
    """Pins: a stream that differs from the whole."""

    class Collect(BaseStreamer):
        def __init__(self):
            self.parts, self.ended = [], False

        def put(self, value):
            self.parts.append(value.flatten().tolist())

        def end(self):
            self.ended = True

    streamer = Collect()
    out = plain(model, streamer=streamer)
    assert streamer.parts[0] == PROMPT[0].tolist()
    assert [t for part in streamer.parts for t in part] == out[0].tolist()
    assert streamer.ended


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_new_tokens": 100_000}, "context"),
        ({"num_beams": 4}, "beam search"),
        ({"attention_mask": torch.zeros(1, 5, dtype=torch.long)}, "all zeros"),
        ({"attention_mask": torch.ones(1, 4, dtype=torch.long)}, "must be equal"),
        ({"stop_strings": ["a"]}, "tokenizer"),
        ({"seed": [1, 2]}, "seed"),
    ],
)
def test_bad_calls_are_one_line(model, settings, says):
    """Pins: a traceback from a kernel, or a setting silently ignored."""
    with pytest.raises(UserError, match=says) as error:
        plain(model, **settings)
    assert "\n" not in str(error.value)


def test_what_a_tokenizer_returns_can_be_given_whole(model):
    """Pins: `model.generate(**tokenizer(text))` refused for token_type_ids."""
    inputs = {
        "input_ids": PROMPT,
        "attention_mask": torch.ones_like(PROMPT),
        "token_type_ids": torch.zeros_like(PROMPT),
    }
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None), plain(model, max_new_tokens=4)
    )


def test_generation_config_of_the_caller_is_respected_and_untouched(model):
    """Pins: a GenerationConfig ignored, or changed under the caller's hands."""
    config = GenerationConfig(max_new_tokens=4, do_sample=False)
    before = config.to_dict()
    assert model.generate(PROMPT, generation_config=config, eos_token_id=None).shape[1] == PROMPT.shape[1] + 4
    assert config.to_dict() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 12, 13, 16, 17, 31, 40, 70])
def test_few_rows_product_is_the_product(dtype, rows):
    """Pins: the fast route of decoding giving another product than the plain one."""
    x, w = torch.randn(rows, 96).to(dtype), torch.randn(5000, 96).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.25  # a bfloat16 unit at |x.w| about 30 is 0.125
    torch.testing.assert_close(few_rows_product(x, w).float(), x.float() @ w.float().t(), atol=tolerance, rtol=0)


def test_few_rows_without_a_compiler_is_the_same_product(monkeypatch):
    """Pins: a machine without a C compiler failing, or getting another product."""
    x, w = torch.randn(5, 96).bfloat16(), torch.randn(333, 96).bfloat16()
    native.few_rows_kernel.cache_clear()
    monkeypatch.setenv("POLYDECODE_NATIVE", "0")
    assert native.few_rows_kernel() is None
    portable = few_rows_product(x, w)
    monkeypatch.delenv("POLYDECODE_NATIVE")
    native.few_rows_kernel.cache_clear()
    torch.testing.assert_close(portable.float(), few_rows_product(x, w).float(), atol=0.25, rtol=0)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_kernel_is_compiled_once_and_survives_a_broken_cache(monkeypatch, tmp_path):
    """Pins: a kernel compiled at every start, or a damaged cached library taken for one that works."""
    monkeypatch.setenv("POLYDECODE_CACHE", str(tmp_path))
    monkeypatch.delenv("POLYDECODE_NATIVE", raising=False)
    native.few_rows_kernel.cache_clear()
    assert native.few_rows_kernel() is not None
    (library,) = (tmp_path / "kernels").glob("*.so")
    made = library.stat().st_mtime_ns
    native.few_rows_kernel.cache_clear()
    assert native.few_rows_kernel() is not None
    assert library.stat().st_mtime_ns == made
    library.unlink()
    library.write_bytes(b"broken")
    native.few_rows_kernel.cache_clear()
    assert native.few_rows_kernel() is not None
    native.few_rows_kernel.cache_clear()
