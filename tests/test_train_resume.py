"""A run that is killed and resumed equals the run that was not, and only the same run can be resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from polydecode.auto import load, load_tokenizer
from polydecode.config import TrainConfig
from polydecode.convert import convert, save_checkpoint
from polydecode.errors import UserError
from polydecode.ops.sampling import mix_seed
from polydecode.train import DecoderTrainer, train
from tiny import tiny_base
from tiny_tokenizer import tiny_tokenizer

METHODS = {
    "autoregressive": {},
    "dmtd": {"cycle_length": 3, "num_decoding_layers": 2},
    "block_diffusion": {"block_size": 4},
}


def make_checkpoint(path: Path, method: str, **changes) -> Path:
    base = tiny_base(dtype=torch.float32, vocab_size=300, initializer_range=0.05, tie_word_embeddings=True)
    save_checkpoint(convert(base, method=method, **(METHODS[method] | changes)), tiny_tokenizer(), path, overwrite=True)
    return path


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    words = ["apple", "river", "stone", "Paris"]
    lines = [
        {"prompt": f"say {words[i % 4]} {i} ->", "response": f" {words[i % 4]} {i}" * (1 + i % 3)} for i in range(29)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def config(checkpoint, out, data, **changes):
    settings = {
        "batch_size": 8, "micro_batch_size": 4, "max_steps": 9, "learning_rate": 1e-3, "log_steps": 1, "eval_fraction": 0.0,
        "save_steps": 1, "report_to": "none",
    }  # fmt: skip
    return TrainConfig(checkpoint=str(checkpoint), out=str(out), data=[data], **(settings | changes))


def weights(path):
    return {k: v.clone() for k, v in load(str(path), dtype=torch.float32).state_dict().items()}


class Killed(Exception):
    pass


def train_until(settings, step, consumed):
    """Train, dying without a word in step `step` (None: to the end); `consumed` collects (step, noise seeds)."""
    with pytest.MonkeyPatch.context() as patch:
        whole = DecoderTrainer.compute_loss

        def watched(self, model, inputs, *args, **kwargs):
            if step is not None and self.state.global_step == step:
                raise Killed
            epoch = int(self.state.epoch or 0)
            seeds = [mix_seed(settings.seed, epoch, int(i)) for i in inputs["example_ids"]]
            consumed.append((self.state.global_step, seeds))
            return whole(self, model, inputs, *args, **kwargs)

        patch.setattr(DecoderTrainer, "compute_loss", watched)
        train(settings)


def by_step(consumed):
    """Every set of noise seeds seen in a step; one that was made again with other examples has too many."""
    return {step: {tuple(seeds) for at, seeds in consumed if at == step} for step, _ in consumed}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_killed_twice_equals_uninterrupted(tmp_path, data, method, lora_rank):
    """Pins: a resume that repeats, skips or reorders examples, draws other noise, or restarts the data at the second resume;
    with accumulation, across the end of an epoch (29 examples, uneven last batch), bit for bit."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", method)
    expected: list = []
    train_until(config(checkpoint, tmp_path / "whole", data, lora_rank=lora_rank), None, expected)
    consumed: list = []
    settings = config(checkpoint, tmp_path / "parts", data, lora_rank=lora_rank, save_steps=2)
    for step in (3, 7, None):
        try:
            train_until(settings, step, consumed)
        except Killed:
            settings.resume = True
    assert by_step(consumed) == by_step(expected)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    logs = [json.loads((tmp_path / n / "training_metrics.json").read_text())["log"] for n in ("whole", "parts")]
    losses = [[(line["step"], line["loss"], line["grad_norm"]) for line in log if "loss" in line] for log in logs]
    assert losses[0] == losses[1]
    assert [step for step, *_ in losses[0]] == list(range(1, 10))


def test_sigkill_and_resume(tmp_path, data):
    """Pins: a kill -9 that leaves nothing to go on from, or a half-written checkpoint that is picked."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "block_diffusion")
    whole = config(checkpoint, tmp_path / "whole", data, max_steps=60)
    train(whole)
    out = tmp_path / "parts"
    command = [
        sys.executable, "-m", "polydecode", "train", str(checkpoint), str(out), "--data", data, "--batch-size", "8",
        "--micro-batch-size", "4", "--max-steps", "60", "--learning-rate", "1e-3", "--log-steps", "1", "--eval-fraction", "0",
        "--save-steps", "1", "--report-to", "none",
    ]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    waited = time.monotonic() + 120
    while not any(out.glob("checkpoints/checkpoint-[3-9]/progress.json")) and time.monotonic() < waited:
        assert child.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    broken = out / "checkpoints" / "checkpoint-59"  # as if killed while writing
    broken.mkdir()
    (broken / "trainer_state.json").write_text("{")
    train(config(checkpoint, out, data, max_steps=60, resume=True))
    expected, resumed = weights(tmp_path / "whole"), weights(out)
    assert all(torch.equal(expected[k], resumed[k]) for k in expected)


def test_resuming_another_run_is_refused_by_name(tmp_path, data):
    """Pins: a resume that silently goes on with other data, tokenizer, method settings or learning rate."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    settings = {"max_steps": 2, "save_steps": 1}
    train(config(checkpoint, tmp_path / "out", data, **settings))
    before = {f: f.read_bytes() for f in (tmp_path / "out").rglob("*") if f.is_file()}

    def refused(says, source=checkpoint, **changes):
        with pytest.raises(UserError, match=says):
            train(config(source, tmp_path / "out", changes.pop("data", data), **settings, resume=True, **changes))

    refused("learning_rate was 0.001, now it is 0.002", learning_rate=0.002)
    refused("batch_size was 8, now it is 4", batch_size=4)
    refused("seed was", seed=1)
    refused("lora_rank was 0, now it is 2", lora_rank=2)
    refused("cycle_length was 3, now it is 2", source=make_checkpoint(tmp_path / "other", "dmtd", cycle_length=2))
    refused("method was dmtd, now it is block_diffusion", source=make_checkpoint(tmp_path / "third", "block_diffusion"))
    other = make_checkpoint(tmp_path / "fourth", "dmtd")
    weight = load(str(other), dtype=torch.float32)
    with torch.no_grad():
        weight.base.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    save_checkpoint(weight, load_tokenizer(str(other)), other, overwrite=True)
    refused("weights was", source=other)
    longer = tmp_path / "longer.jsonl"
    longer.write_text(Path(data).read_text() + '\n{"prompt": "one more", "response": " again"}')
    refused("data was", data=str(longer))
    tokenizer = load_tokenizer(str(checkpoint))
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(checkpoint)
    refused("tokenizer was")
    assert before == {f: f.read_bytes() for f in (tmp_path / "out").rglob("*") if f.is_file()}


def test_what_may_change_on_resume(tmp_path, data):
    """Pins: a resume that refuses a longer run, other log steps, another split into micro batches, or moved files."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    train(config(checkpoint, tmp_path / "out", data, max_steps=2))
    moved = tmp_path / "moved.jsonl"
    moved.write_text(Path(data).read_text())
    more = {"max_steps": 4, "log_steps": 2, "micro_batch_size": 8, "save_steps": 2}
    metrics = train(config(checkpoint, tmp_path / "out", str(moved), resume=True, **more))
    assert metrics["steps"] == 4


def test_a_run_killed_before_its_first_checkpoint_may_start_anew(tmp_path, data):
    """Pins: a folder that can neither be resumed nor used again."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    with pytest.raises(Killed):
        train_until(config(checkpoint, tmp_path / "out", data, save_steps=0), 1, [])
    assert (tmp_path / "out" / "run.json").is_file()
    (tmp_path / "out" / "samples.jsonl").write_text("{}")
    half = tmp_path / "out" / "checkpoints" / "checkpoint-1"
    half.mkdir(parents=True, exist_ok=True)
    (half / "model.safetensors").write_text("half")
    with pytest.raises(UserError, match="nothing to resume"):
        train(config(checkpoint, tmp_path / "out", data, resume=True))
    assert train(config(checkpoint, tmp_path / "out", data, max_steps=1))["steps"] == 1
