"""Training end to end on tiny models: what is trained, written, logged and bounded."""

import json
import math
import signal

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from polydecode.auto import load
from polydecode.config import TrainConfig
from polydecode.convert import convert, save_checkpoint
from polydecode.errors import UserError
from polydecode.train import Budget, averages, train
from tiny import tiny_base
from tiny_tokenizer import tiny_tokenizer

METHODS = {
    "autoregressive": {},
    "dmtd": {"cycle_length": 3, "num_decoding_layers": 2},
    "block_diffusion": {"block_size": 4},
}


@pytest.fixture(params=list(METHODS))
def checkpoint(request, tmp_path):
    base = tiny_base(dtype=torch.float32, vocab_size=300, initializer_range=0.05, tie_word_embeddings=True)
    path = tmp_path / "checkpoint"
    save_checkpoint(convert(base, method=request.param, **METHODS[request.param]), tiny_tokenizer(), path)
    return path


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    words = ["apple", "river", "stone", "Paris"]
    lines = [
        json.dumps({"prompt": f"say {words[i % 4]} {i % 7} ->", "response": f" {words[i % 4]} {i % 7}"})
        for i in range(120)
    ]
    path.write_text("\n".join(lines))
    return str(path)


def config(checkpoint, tmp_path, data, **changes):
    changes.setdefault("out", str(tmp_path / "out"))
    settings = {"batch_size": 8, "max_steps": 6, "learning_rate": 1e-3, "log_steps": 2, "eval_fraction": 0.2}
    return TrainConfig(checkpoint=str(checkpoint), data=[data], **(settings | changes))


def weights(path):
    return {k: v.clone() for k, v in load(str(path), dtype=torch.float32).state_dict().items()}


def test_training_lowers_the_loss_and_leaves_a_loadable_checkpoint(checkpoint, tmp_path, data):
    """Pins: a quick start that ends without a checkpoint, or a loss that is not the method's."""
    settings = config(checkpoint, tmp_path, data, max_steps=60, learning_rate=1e-2, log_steps=5, train_embeddings=True)
    metrics = train(settings)
    log = [e for e in json.loads((tmp_path / "out" / "training_metrics.json").read_text())["log"] if "loss" in e]
    assert log[-1]["loss"] < 0.6 * log[0]["loss"]
    assert log[-1]["tokens_per_s"] > 0
    assert metrics["eval_loss"] < log[0]["loss"]
    model = load(str(tmp_path / "out"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.generate(**tokenizer("say apple 1 ->", return_tensors="pt"), max_new_tokens=5).shape[1] > 4


def test_embeddings_and_head_stay_frozen_unless_asked(checkpoint, tmp_path, data):
    """Pins: tied head or embeddings trained although the default freezes them."""
    train(config(checkpoint, tmp_path, data, train_embeddings=False))
    before, after = weights(checkpoint), weights(tmp_path / "out")
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert changed
    assert not any("embed" in k or "lm_head" in k for k in changed)


@pytest.mark.parametrize("micro", [2, 4])
def test_accumulation_changes_nothing(checkpoint, tmp_path, data, micro):
    """Pins: a mean of means over micro batches of different target counts."""
    train(config(checkpoint, tmp_path, data, max_steps=3))
    whole = weights(tmp_path / "out")
    train(config(checkpoint, tmp_path, data, max_steps=3, micro_batch_size=micro, out=str(tmp_path / "split")))
    split = weights(tmp_path / "split")
    for name, value in whole.items():
        torch.testing.assert_close(split[name], value, atol=2e-5, rtol=0)


def test_phases_are_logged_for_dmtd(tmp_path, data):
    """Pins: per-phase numbers missing or wrong: their weighted mean must be the whole."""
    base = tiny_base(dtype=torch.float32, vocab_size=300)
    save_checkpoint(
        convert(base, method="dmtd", cycle_length=3, num_decoding_layers=2), tiny_tokenizer(), tmp_path / "c"
    )
    metrics = train(config(tmp_path / "c", tmp_path, data))
    phases = [metrics[f"eval_loss_phase_{p}"] for p in range(3)]
    assert min(phases) <= metrics["eval_loss"] <= max(phases)


def test_lora_writes_an_adapter_that_loads_merged(checkpoint, tmp_path, data):
    """Pins: an adapter that reloads as the untrained model, or with other logits than in training."""
    train(config(checkpoint, tmp_path, data, lora_rank=4, learning_rate=1e-2, max_steps=10))
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    trained, start = load(str(tmp_path / "out")), load(str(checkpoint))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    with torch.no_grad():
        assert (trained(ids).logits - start(ids).logits).abs().max() > 1e-3
    assert trained.config.method == start.config.method


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_weights_are_written_in_the_dtype_asked_for(checkpoint, tmp_path, data, lora_rank):
    """Pins: save_dtype ignored, or a rounded adapter that no longer loads."""
    train(config(checkpoint, tmp_path, data, lora_rank=lora_rank, save_dtype="bfloat16", max_steps=2))
    file = "adapter_model.safetensors" if lora_rank else "model.safetensors"
    with safe_open(tmp_path / "out" / file, "pt") as weights_file:
        assert {weights_file.get_slice(k).get_dtype() for k in weights_file.keys()} == {"BF16"}  # noqa: SIM118
    assert load(str(tmp_path / "out")).config.method == load(str(checkpoint)).config.method


def test_adapter_can_name_the_source_its_checkpoint_came_from(checkpoint, tmp_path, data):
    """Pins: an adapter tied to a converted folder that only holds the source's weights, or naming other weights."""
    load(str(checkpoint)).base.save_pretrained(tmp_path / "source")
    settings = {"lora_rank": 4, "max_steps": 2, "adapter_source": str(tmp_path / "source")}
    train(config(checkpoint, tmp_path, data, **settings))
    assert json.loads((tmp_path / "out" / "polydecode_adapter.json").read_text())["source"] == "../source"
    tiny_base(dtype=torch.float32, vocab_size=300, seed=5).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="other weights"):
        train(config(checkpoint, tmp_path, data, **settings | {"adapter_source": str(tmp_path / "other"), "out": "x"}))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_resume_goes_on_where_it_stopped(checkpoint, tmp_path, data, lora_rank):
    """Pins: a resumed run that repeats or skips steps, or loses what is trained beside adapters: its weights must equal the
    uninterrupted run's, bit for bit."""
    choice = {"lora_rank": 4, "train_embeddings": True, "train_norms": True} if lora_rank else {}
    whole = config(checkpoint, tmp_path, data, max_steps=6, save_steps=3, out=str(tmp_path / "whole"), **choice)
    train(whole)
    first = config(checkpoint, tmp_path, data, max_steps=6, save_steps=3, out=str(tmp_path / "parts"), **choice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Budget, "used_up", lambda self, step: step >= 4)
        train(first)
    for path in (tmp_path / "parts").iterdir():  # only what a killed run leaves
        if path.name != "checkpoints" and path.is_file():
            path.unlink()
    first.resume = True
    train(first)
    expected, resumed = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(expected[k], resumed[k]) for k in expected)


def test_interrupt_leaves_a_loadable_checkpoint(checkpoint, tmp_path, data):
    """Pins: Ctrl-C that loses the run."""
    steps = []

    def interrupt_at_two(self, step):
        steps.append(step)
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Budget, "used_up", interrupt_at_two)
        metrics = train(config(checkpoint, tmp_path, data, max_steps=50))
    assert metrics["interrupted"]
    assert metrics["steps"] == 2
    load(str(tmp_path / "out"))


def test_token_budget_ends_the_run(checkpoint, tmp_path, data):
    """Pins: max_tokens ignored, or the schedule not reaching its end with it."""
    metrics = train(config(checkpoint, tmp_path, data, max_steps=0, epochs=50, max_tokens=400))
    assert 400 <= metrics["tokens"] < 700


def test_schedule_is_warm_up_then_decay_to_zero():
    """Pins: a schedule that does not reach its peak or its end."""
    budget = Budget(TrainConfig(max_steps=100, warmup_ratio=0.1), 100)
    assert budget.factor(5) == pytest.approx(0.5)
    assert budget.factor(10) == pytest.approx(1.0)
    assert budget.factor(55) == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    assert budget.factor(100) == pytest.approx(0.0)


def test_averages_divide_sums_by_their_counts():
    """Pins: an average over steps instead of tokens."""
    assert averages({"a": 6.0, "a_count": 4.0, "lone": 3.0, "none": 0.0, "none_count": 0.0}) == {"a": 1.5}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 8, "micro_batch_size": 3}, "multiple"),
        ({"schedule": "cosin"}, "schedule"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"max_steps": 0, "epochs": 0}, "bounds"),
        ({"data": []}, "--data"),
    ],
)
def test_bad_settings_are_one_line(changes, says):
    """Pins: a bad setting found after minutes of loading, or by a traceback."""
    with pytest.raises(UserError, match=says):
        TrainConfig(**({"checkpoint": "c", "out": "o", "data": ["d"]} | changes)).check()


def test_output_folder_with_files_is_refused(checkpoint, tmp_path, data):
    """Pins: a run that overwrites another's results."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "keep.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        train(config(checkpoint, tmp_path, data))
    assert (tmp_path / "out" / "keep.txt").read_text() == "mine"
