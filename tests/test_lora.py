"""LoRA conversion: what is trained beside the adapters comes back, tied heads stay tied, adapters stand on adapters."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from polydecode.auto import load, load_tokenizer
from polydecode.config import TrainConfig
from polydecode.convert import convert, export_base, save_checkpoint
from polydecode.errors import UserError
from polydecode.train import train
from tiny import tiny_base
from tiny_tokenizer import tiny_tokenizer

METHODS = {"dmtd": {"cycle_length": 2, "num_decoding_layers": 2}, "block_diffusion": {"block_size": 4}}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
FRESH = """
import sys, torch
from polydecode import load
with torch.no_grad():
    torch.save(load(sys.argv[1], dtype="float32")(torch.tensor([[5, 6, 7, 8, 9, 10, 11]])).logits, sys.argv[2])
"""


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i} ->", "response": f" apple {i}"}) + "\n" for i in range(40)))
    return str(path)


def checkpoint(tmp_path, method, tied=True, name="checkpoint"):
    base = tiny_base(dtype=torch.float32, vocab_size=300, layers=3, initializer_range=0.1, tie_word_embeddings=tied)
    model = convert(base, method, tokenizer=tiny_tokenizer(), **METHODS.get(method, {}))
    return save_checkpoint(model, tiny_tokenizer(), tmp_path / name)


def trained(source, out, data, **changes):
    settings = {"lora_rank": 4, "max_steps": 3, "batch_size": 4, "learning_rate": 1e-2, "eval_fraction": 0.2}
    train(TrainConfig(checkpoint=str(source), out=str(out), data=[data], **(settings | changes)))
    return out


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("everything", [True, False])
def test_an_adapter_comes_back_in_a_fresh_process(tmp_path, data, capsys, method, tied, everything):
    """Bugs (known faults 4, 5): a trained head or embedding discarded, a tied head overwritten on reload, merged logits
    that differ."""
    source = checkpoint(tmp_path, method, tied)
    out = trained(source, tmp_path / "adapter", data, train_embeddings=everything, train_norms=everything)
    told = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("training "))
    assert "of adapters" in told
    assert ("of embeddings, norms and head" in told) == everything
    assert (out / "trained_weights.safetensors").exists() == everything
    model = load(out)
    before = load(source)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    moved = (model.get_input_embeddings().weight != before.get_input_embeddings().weight).any()
    assert bool(moved) == everything
    head_moved = (model.get_output_embeddings().weight != before.get_output_embeddings().weight).any()
    assert bool(head_moved) == everything
    assert bool((model.base.model.norm.weight != before.base.model.norm.weight).any()) == everything
    assert (logits(model) - logits(before)).abs().max() > 1e-3
    subprocess.run([sys.executable, "-c", FRESH, str(out), str(tmp_path / "logits.pt")], check=True, timeout=120)
    assert (torch.load(tmp_path / "logits.pt") - logits(model)).abs().max() < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(export_base(out, tmp_path / "plain"), dtype=torch.float32)
    with torch.no_grad():
        causal = plain(IDS).logits
        again = load(tmp_path / "plain")(IDS).logits
    assert (causal - again).abs().max() < 1e-5
    state = model.base.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())


def test_what_is_saved_is_what_was_trained(tmp_path, data):
    """Bug: an adapter applied to other weights than it was trained on: the loss at the end is that of the loaded model."""
    source = checkpoint(tmp_path, "block_diffusion")
    out = trained(source, tmp_path / "adapter", data, max_steps=12)
    final = json.loads((out / "training_metrics.json").read_text())["final"]
    shutil.rmtree(tmp_path / "again", ignore_errors=True)
    save_checkpoint(load(out), load_tokenizer(out), tmp_path / "merged")
    metrics = train(
        TrainConfig(
            checkpoint=str(tmp_path / "merged"), out=str(tmp_path / "again"), data=[data], max_steps=1, batch_size=4,
            learning_rate=1e-12, eval_fraction=0.2,
        )
    )  # fmt: skip
    assert abs(metrics["eval_loss"] - final["eval_loss"]) < 1e-3


def test_an_adapter_may_stand_on_an_adapter(tmp_path, data):
    """Bug: the path of the second one's source lost when both are moved, or the first one not applied."""
    source = checkpoint(tmp_path, "autoregressive")
    pair = tmp_path / "adapters"
    control = trained(source, pair / "control", data)
    save_checkpoint(convert(control, "block_diffusion", block_size=4), load_tokenizer(control), tmp_path / "start")
    second = trained(tmp_path / "start", pair / "blocks", data, adapter_source=str(control), train_embeddings=False)
    assert json.loads((second / "polydecode_adapter.json").read_text())["source"] == "../control"
    expected = logits(load(second))
    shutil.move(pair, tmp_path / "moved")
    model = load(tmp_path / "moved" / "blocks")
    assert torch.equal(logits(model), expected)
    assert model.config.vocab_size == 301
    assert load_tokenizer(tmp_path / "moved" / "blocks").eos_token_id == 2
    with pytest.raises(UserError, match="other weights"):
        trained(tmp_path / "start", tmp_path / "x", data, adapter_source=str(source))


def test_targets_are_names_of_layers(tmp_path, data):
    """Bug: a misspelt layer that trains nothing."""
    source = checkpoint(tmp_path, "dmtd")
    out = trained(source, tmp_path / "a", data, lora_targets="q_proj,v_proj")
    assert sorted(json.loads((out / "adapter_config.json").read_text())["target_modules"]) == ["q_proj", "v_proj"]
    with pytest.raises(UserError, match=r"lora_targets names 'q_prj'; the linear layers are .*q_proj"):
        trained(source, tmp_path / "b", data, lora_targets="q_prj")
    assert not (tmp_path / "b").exists()


def test_damaged_trained_weights_are_told(tmp_path, data):
    """Bug: a file that does not fit, taken in part or in silence."""
    from safetensors.torch import save_file

    out = trained(checkpoint(tmp_path, "block_diffusion"), tmp_path / "adapter", data)
    save_file({"model.norm.weight": torch.zeros(3)}, out / "trained_weights.safetensors")
    with pytest.raises(UserError, match="does not fit"):
        load(out)
