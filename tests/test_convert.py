"""Conversion: which architectures pass the measured check, what is refused, and the way back to the source."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from polydecode.auto import check_architecture, load, load_base
from polydecode.auto import loading as loading_module
from polydecode.convert import convert, convert_to_folder, export_base, save_checkpoint
from polydecode.errors import UserError
from polydecode.ops.layers import SUPPORTED
from tiny import VOCAB, tiny_base, tiny_config

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
SUPPORTED_CASES = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama rope llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window in half of the layers": ("Qwen2", QWEN_WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 8}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {}),
    "phi3 window": ("Phi3", {"sliding_window": 8}),
    "granite": ("Granite", GRANITE),
}
REFUSED_CASES = {
    "gemma2": ("Gemma2", SHAPE | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "cohere": ("Cohere", SHAPE),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mamba": ("Mamba", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}


def random_model(family: str, settings: dict, dtype=torch.float32, attention: str | None = None):
    """A tiny random model of a family of transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    choice = {} if attention is None else {"attn_implementation": attention}
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **choice).eval()


def refusal(function, *args, **kwargs) -> str:
    """The message of the UserError that the call raises; it has one line."""
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def logits_of(model, length: int = 30) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


# --- the measured check --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", SUPPORTED_CASES)
def test_supported_families_pass_and_cycle_length_1_is_the_source(case, attention):
    """Pins: a scaling, a window, a rotary table or a mask that the sliced run leaves out."""
    family, overrides = SUPPORTED_CASES[case]
    base = random_model(family, SHAPE | overrides, attention=attention)
    model = convert(base, "dmtd", num_decoding_layers=2, cycle_length=1)
    assert model.base is base
    torch.testing.assert_close(logits_of(model), logits_of(base), rtol=0, atol=1e-4)  # float32, logits up to about 10


def test_every_family_that_is_said_to_work_is_tested():
    """Pins: a promise in the error messages that nothing checks."""
    named = SUPPORTED.removeprefix("known to work: ").split(", ")
    assert set(named) == {case.split()[0] for case in SUPPORTED_CASES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", REFUSED_CASES)
def test_other_families_are_refused_in_one_line(case, dtype):
    """Pins: wrong logits of a family that does more between its layers, and tracebacks of those that have none."""
    family, settings = REFUSED_CASES[case]
    message = refusal(convert, random_model(family, settings, dtype), "dmtd", num_decoding_layers=1)
    assert repr(case) in message
    if case in ("gemma2", "cohere"):
        assert "of the largest" in message


def test_a_refused_family_is_refused_from_a_folder_too(tmp_path):
    """Pins: a folder whose architecture is told as a missing attention kernel, or served with wrong logits by `load`."""
    random_model("Gemma2", REFUSED_CASES["gemma2"][1]).save_pretrained(tmp_path / "gemma2")
    assert "of the largest" in refusal(convert, tmp_path / "gemma2", num_decoding_layers=2)
    assert "of the largest" in refusal(load, tmp_path / "gemma2")


def test_a_small_difference_is_refused(monkeypatch):
    """Pins: a tolerance so wide that a forgotten scaling of a small part passes."""
    base = random_model("Granite", SHAPE | GRANITE)
    assert check_architecture(base) < 1e-5
    forward = base.forward
    monkeypatch.setattr(base, "forward", lambda *a, **k: _scaled(forward(*a, **k), 1.001))
    assert "granite" in refusal(check_architecture, base)


def _scaled(output, factor: float):
    output.logits = output.logits * factor
    return output


@pytest.mark.parametrize("limit", [0, 10**9])
def test_the_check_leaves_half_precision_weights_as_they_were(monkeypatch, limit):
    """Pins: a check in float32 that leaves the model in float32, unties its head or rounds the rotary table; with the
    limit at 0, a check in bfloat16 that refuses a good model for its rounding."""
    monkeypatch.setattr(loading_module, "FLOAT32_CHECK_PARAMETERS", limit)
    base = random_model("Llama", SHAPE | {"tie_word_embeddings": True}, torch.bfloat16)
    table = base.model.rotary_emb.inv_freq.clone()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = convert(base, num_decoding_layers=2)
    after = model.base.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())
    assert torch.equal(base.model.rotary_emb.inv_freq, table)
    assert base.lm_head.weight is base.model.embed_tokens.weight


# --- settings ------------------------------------------------------------------------------------------------------


def test_wrong_names_and_values_are_told_before_any_weight_is_read(tmp_path):
    """Pins: minutes of loading before a typing error is told. The folder has no weights, so reading them would fail."""
    tiny_config().save_pretrained(tmp_path / "source")
    source = tmp_path / "source"
    assert "did you mean 'dmtd'?" in refusal(convert, source, "dmdt")
    assert "did you mean 'cycle_length'?" in refusal(convert, source, "dmtd", cycle_lenght=3)
    assert "cycle_length is 0" in refusal(convert, source, "dmtd", num_decoding_layers=2, cycle_length=0)
    assert "cycle_length is '3'" in refusal(convert, source, "dmtd", num_decoding_layers=2, cycle_length="3")
    assert "at most 5" in refusal(convert, source, "dmtd", num_decoding_layers=9)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    assert "not empty" in refusal(convert_to_folder, source, tmp_path / "taken", "dmtd", {"num_decoding_layers": 2})


def test_what_is_no_language_model(tmp_path):
    """Pins: an AttributeError for a torch module, or for a model without a head."""
    assert "Linear" in refusal(convert, torch.nn.Linear(2, 2))
    assert "head" in refusal(convert, tiny_base().model, num_decoding_layers=2)


# --- sources of a conversion, and the way back ---------------------------------------------------------------------


def test_a_converted_model_is_unwrapped_before_it_is_wrapped_again(tmp_path):
    """Pins: a dmtd model around an autoregressive model, in memory and from a checkpoint that was fine-tuned."""
    tuned = convert(tiny_base(dtype=torch.float32), "autoregressive")
    with torch.no_grad():
        tuned.base.model.layers[0].mlp.up_proj.weight.add_(0.1)
    folder = save_checkpoint(tuned, None, tmp_path / "tuned")
    for source in (tuned, folder):
        model = convert(source, "dmtd", num_decoding_layers=2, cycle_length=1)
        assert type(model.base).__name__ == "LlamaForCausalLM"
        torch.testing.assert_close(logits_of(model), logits_of(tuned), rtol=0, atol=1e-4)
    again = convert(convert(folder, "dmtd", num_decoding_layers=2), "autoregressive")
    assert torch.equal(logits_of(again), logits_of(load(folder)))


@pytest.mark.parametrize("case", SUPPORTED_CASES)
def test_export_gives_back_the_source(case, tmp_path):
    """Pins: weights, ties or config entries of the source lost on the way through a checkpoint."""
    family, overrides = SUPPORTED_CASES[case]
    base = random_model(family, SHAPE | overrides)
    base.save_pretrained(tmp_path / "source")
    out = convert_to_folder(tmp_path / "source", tmp_path / "out", "dmtd", {"num_decoding_layers": 2})
    plain = export_base(out, tmp_path / "plain")
    exported = AutoModelForCausalLM.from_pretrained(plain)
    assert type(exported) is type(base)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert torch.equal(logits_of(exported), logits_of(expected))
    tied = exported.get_input_embeddings().weight is exported.get_output_embeddings().weight
    assert tied is base.config.tie_word_embeddings
    for name in ("config.json", "generation_config.json"):
        assert json.loads((plain / name).read_text()) == json.loads((tmp_path / "source" / name).read_text())
    assert (plain / "model.safetensors").read_bytes() == (tmp_path / "source" / "model.safetensors").read_bytes()
    assert not list(plain.glob("modeling_polydecode*"))
    torch.testing.assert_close(logits_of(load_base(out)), logits_of(expected), rtol=0, atol=0)


def test_a_failed_conversion_leaves_no_folder(tmp_path, monkeypatch):
    """Pins: half a checkpoint that a later run takes for a whole one."""
    tiny_base(dtype=torch.float32).save_pretrained(tmp_path / "source")

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.GenerationConfig, "save_pretrained", full)
    message = refusal(convert_to_folder, tmp_path / "source", tmp_path / "out", "dmtd", {"num_decoding_layers": 2})
    assert "disk full" in message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
