"""What ends a bad run, what a run shows of itself, schedules, and where its numbers go."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polydecode.auto import load
from polydecode.config import TrainConfig
from polydecode.errors import UserError
from polydecode.train import Budget, DecoderTrainer, train
from polydecode.train.checks import Diverged, Watch
from polydecode.train.progress import RunLog
from polydecode.train.resume import COMPLETE_FILE, checkpoints, complete, last_checkpoint, rotate
from test_train_resume import METHODS, config, data, make_checkpoint, weights

__all__ = ["data"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_ends_the_run(value):
    """Pins: NaN that is averaged away in the log and trained on."""
    with pytest.raises(Diverged, match="step 1"):
        Watch(20.0).take_update(1, value, 1.0, value)
    with pytest.raises(Diverged, match="step 1"):
        Watch(0.0).take_update(1, 1.0, value, 1.0)


def test_lone_spikes_are_left_out_and_five_end_the_run(capsys):
    """Pins: a gradient norm of 50,000 that is clipped and stepped on as if nothing were wrong."""
    watch = Watch(20.0)
    assert all(watch.take_update(i, 2.0, 1.0 + i % 3, 2.0) for i in range(30))
    assert not watch.take_update(30, 2.0, 500.0, 2.0)
    assert "left out" in capsys.readouterr().err
    assert watch.take_update(31, 2.0, 1.0, 2.0)
    assert [watch.take_update(i, 2.0, 500.0, 2.0) for i in range(32, 36)] == [False] * 4
    with pytest.raises(Diverged, match="5 steps in a row"):
        watch.take_update(36, 2.0, 500.0, 2.0)


def test_a_rising_loss_ends_the_run_and_a_restored_watch_judges_alike():
    """Pins: loss 3 -> 10 that goes on for hours; a resume that forgets what is usual."""
    watch = Watch(20.0)
    for i in range(40):
        watch.take_update(i, 3.0, 1.0, 3.0)
    other = Watch(20.0)
    other.restore(json.loads(json.dumps(watch.state())))

    def rise(each):
        for i in range(40, 80):
            each.take_update(i, 10.0, 1.0, 10.0)

    for each in (watch, other):
        with pytest.raises(Diverged, match="has risen"):
            rise(each)
    assert watch.state() == other.state()


def test_divergence_keeps_the_last_good_checkpoint(tmp_path, data):
    """Pins: a run that ends in NaN and has written it over everything (known fault 24)."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    whole = DecoderTrainer.compute_loss

    def poisoned(self, *args, **kwargs):
        return whole(self, *args, **kwargs) * (math.nan if self.state.global_step == 5 else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderTrainer, "compute_loss", poisoned)
        with pytest.raises(UserError, match=r"step 6: .* norm nan; the last good checkpoint is .*checkpoint-4"):
            train(config(checkpoint, tmp_path / "out", data, save_steps=2))
    assert not (tmp_path / "out" / "config.json").exists()
    metrics = train(config(checkpoint, tmp_path / "out", data, save_steps=2, resume=True))
    assert metrics["steps"] == 9
    assert all(torch.isfinite(w).all() for w in weights(tmp_path / "out").values())


def test_a_hundredfold_learning_rate_is_stopped(tmp_path, data):
    """Pins: the same with a real divergence, not an injected one."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "autoregressive")
    bad = {
        "max_steps": 300,
        "save_steps": 5,
        "learning_rate": 100.0,
        "warmup_ratio": 0.3,
        "schedule": "constant",
        "max_grad_norm": 1e9,
    }
    settings = config(checkpoint, tmp_path / "out", data, **bad)
    with pytest.raises(UserError, match="training stopped: step") as stopped:
        train(settings)
    good = re.search(r"the last good checkpoint is (\S+checkpoint-\d+)", str(stopped.value))
    assert good, stopped.value
    assert all(torch.isfinite(w).all() for w in load_file(Path(good[1]) / "model.safetensors").values())


def test_a_checkpoint_from_before_a_rise_is_kept(tmp_path):
    """Pins: a rise noticed 20 steps late, when rotation has deleted all checkpoints but those it had spoilt."""
    for step in range(10, 101, 10):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / COMPLETE_FILE).write_text('{"files": {}}')
        rotate(tmp_path, 2, step)
        assert len(checkpoints(tmp_path)) <= 4
        assert list(checkpoints(tmp_path))[-1] == step
        if step >= 50:
            assert step - 90 < int(last_checkpoint(tmp_path, until=step - 40).name.rsplit("-", 1)[1])


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_leaves_the_run_as_it_is(tmp_path, data, method):
    """Pins: an evaluation that uses the run's random numbers or leaves the model in another mode."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", method)
    settings = {"max_steps": 4, "eval_fraction": 0.3, "save_steps": 0}
    train(config(checkpoint, tmp_path / "plain", data, **settings))
    shown = config(checkpoint, tmp_path / "shown", data, eval_steps=1, eval_samples=2, **settings)
    metrics = train(shown)
    a, b = weights(tmp_path / "plain"), weights(tmp_path / "shown")
    assert all(torch.equal(a[k], b[k]) for k in a)
    samples = [json.loads(line) for line in (tmp_path / "shown" / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], "from before the first step, each once"
    assert all(s["tokens_per_forward"] > 0 and s["prompt"].startswith("say") for s in samples)
    assert 0 <= metrics["eval_samples_exact"] <= 1


def test_first_line_says_what_is_normal(tmp_path, data, capsys):
    """Pins: 'is a loss of 30 normal?': the unweighted cross-entropy and ln V stand beside it (known fault 23)."""
    train(config(make_checkpoint(tmp_path / "checkpoint", "block_diffusion"), tmp_path / "out", data, max_steps=1))
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("before training"))
    loss, cross_entropy = (float(part) for part in re.findall(r"(?:loss|per token) (\d+\.\d+)", line))
    assert 5 < cross_entropy < 6.5
    assert loss > cross_entropy
    first = json.loads((tmp_path / "out" / "training_metrics.json").read_text())["first"]
    assert first["first_loss"] == pytest.approx(loss, abs=1e-3)
    assert first["first_uniform_loss"] == pytest.approx(
        math.log(load(str(tmp_path / "out")).config.vocab_size), abs=1e-3
    )
    assert f"ln V = {math.log(load(str(tmp_path / 'out')).config.vocab_size):.2f}" in line


def test_the_best_evaluation_is_kept(tmp_path, data):
    """Pins: `keep best` that writes the last weights, or a best that is not what was evaluated."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "autoregressive")
    rising = {"max_steps": 8, "eval_steps": 2, "eval_fraction": 0.3, "learning_rate": 1e-3, "schedule": "constant"}
    losses = iter([3.0, 1.0, 2.0, 4.0, 4.0, 1.5])
    found = []
    whole = DecoderTrainer._held_out_metrics

    def told(self, *args):
        metrics = whole(self, *args)
        if self.state.global_step:
            found.append({k: v.clone() for k, v in self.decoder().state_dict().items()})
            metrics["eval_loss"] = next(losses)
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderTrainer, "_held_out_metrics", told)
        metrics = train(config(checkpoint, tmp_path / "out", data, keep="best", **rising))
    assert metrics["best_step"] == 4
    kept = weights(tmp_path / "out")
    assert all(torch.equal(kept[k], found[1][k]) for k in kept)
    assert not all(torch.equal(kept[k], found[3][k]) for k in kept)


def test_schedules_end_where_they_should():
    """Pins: wsd that comes down too early, a floor that is a share of nothing, cosine below its floor."""
    wsd = Budget(TrainConfig(schedule="wsd", warmup_ratio=0.1, decay_ratio=0.2), 100)
    assert [round(wsd.factor(s), 3) for s in (5, 10, 50, 80, 90, 100)] == [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    paper = {"learning_rate": 1e-5, "min_learning_rate": 3e-6, "warmup_ratio": 0.0}
    for schedule in ("cosine", "linear", "wsd"):
        budget = Budget(TrainConfig(schedule=schedule, **paper), 100)
        assert budget.factor(0) == pytest.approx(1.0)
        assert budget.factor(100) == pytest.approx(0.3)
        assert all(0.3 <= budget.factor(s) <= 1 for s in range(101))
    assert Budget(TrainConfig(schedule="cosine", **paper), 100).factor(50) == pytest.approx(0.65)


def test_numbers_go_to_tensorboard_files(tmp_path, data):
    """Pins: `report_to auto` that writes nothing, or leaves out the method's own averages."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    train(config(checkpoint, tmp_path / "out", data, max_steps=3, save_steps=0, report_to="auto"))
    events = EventAccumulator(str(tmp_path / "out" / "logs"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/accuracy_phase_0", "train/tokens_per_s", "train/grad_norm"} <= set(tags)
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_learning_rate": 1.0}, "above learning_rate"),
        ({"keep": "best"}, "eval-steps"),
        ({"keep": "first"}, "keep is 'first'"),
        ({"report_to": "mail"}, "report_to"),
        ({"schedule": "wsd", "warmup_ratio": 0.9, "decay_ratio": 0.5}, "more than the whole run"),
        ({"spike_factor": -1.0}, "spike_factor"),
    ],
)
def test_bad_settings_are_one_line(changes, says):
    """Pins: a bad setting found after minutes of loading."""
    with pytest.raises(UserError, match=says):
        TrainConfig(**({"checkpoint": "c", "out": "o", "data": ["d"]} | changes)).check()


def test_a_reporter_that_is_not_installed_is_one_line(tmp_path, data):
    """Pins: a run that ends in a traceback of the reporting library."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    with pytest.raises(UserError, match="pip install wandb"):
        train(config(checkpoint, tmp_path / "out", data, report_to="wandb"))


def test_a_weighted_loss_is_judged_by_its_cross_entropy():
    """Pins: a run of block diffusion ended by a few large weights 1/t, or one whose rise the weights' noise hides."""
    calm, rising = Watch(20.0), Watch(20.0)
    for i in range(200):
        calm.take_update(i, 3.0 if i < 50 else 30.0, 1.0, 2.0)
    for i in range(50):
        rising.take_update(i, 5.0, 1.0, 2.0)
    with pytest.raises(Diverged, match="from 2"):
        [rising.take_update(i, 5.0, 1.0, 9.0) for i in range(50, 100)]


@pytest.mark.parametrize("method", ["block_diffusion", "dmtd"])
def test_what_the_trainer_judges(tmp_path, data, method, monkeypatch):
    """Pins: a mean of micro batches' means, or the weighted loss, where the cross-entropy of all targets is meant."""
    judged = []
    whole = Watch.take_update
    monkeypatch.setattr(Watch, "take_update", lambda *a: (judged.append(a[4]), whole(*a))[1])
    checkpoint = make_checkpoint(tmp_path / "checkpoint", method)
    train(config(checkpoint, tmp_path / "out", data, max_steps=3, micro_batch_size=2))
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    name = "cross_entropy" if method == "block_diffusion" else "loss"
    assert judged == pytest.approx([line[name] for line in log if "loss" in line], abs=2e-4)


def test_the_log_grows_with_the_run_and_goes_on_with_it(tmp_path, data):
    """Pins: numbers of a killed run that nobody can see; steps twice in the log of a resumed one."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    out = tmp_path / "out"
    train(config(checkpoint, out, data, max_steps=5, save_steps=3, schedule="constant"))
    file = out / "log.jsonl"
    file.write_text(file.read_text() + '{"step": 6, "lo')
    train(config(checkpoint, out, data, max_steps=7, save_steps=3, schedule="constant", resume=True))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 8))
    assert "first_loss" in lines[0]


def test_the_log_is_cut_by_one_process(tmp_path, monkeypatch):
    """Pins: every process of a resumed run rewriting the same file, so that one of them finds its new file moved away."""
    file = tmp_path / "log.jsonl"
    whole = '{"step": 3}\n{"step": 4}\n'
    file.write_text(whole)
    for rank, kept in (("1", whole), ("0", '{"step": 3}\n')):
        monkeypatch.setenv("RANK", rank)
        RunLog(file).keep_until(3)
        assert file.read_text() == kept
        assert list(tmp_path.iterdir()) == [file]


def test_time_counts_over_all_sessions(tmp_path, data, capsys):
    """Pins: a resumed run that takes its minutes anew, or whose end is told as if it had just begun."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    out = tmp_path / "out"
    bounded = {"max_steps": 0, "epochs": 1000, "schedule": "constant"}
    train(config(checkpoint, out, data, max_minutes=0.02, save_steps=1, **bounded))
    saved = last_checkpoint(out) / COMPLETE_FILE
    record = json.loads(saved.read_text())
    assert 1.0 <= record["budget"]["seconds"] < 20
    record["budget"]["seconds"] = 60.0
    saved.write_text(json.dumps(record))
    capsys.readouterr()
    metrics = train(config(checkpoint, out, data, max_minutes=1.02, save_steps=1, resume=True, **bounded))
    told = capsys.readouterr().err
    assert "resuming from step" in told
    assert "max_minutes 0.02 -> 1.02" in told
    assert metrics["minutes"] >= 1.0
    assert "0:00:0" in told.split("left")[0][-12:], "about a second of 61 is left"


def test_checkpoints_by_time(tmp_path, data, monkeypatch):
    """Pins: a slow run with nothing saved; --save-minutes that works with --save-steps only."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    train(config(checkpoint, tmp_path / "out", data, max_steps=4, save_steps=0, save_minutes=1e-6, save_total_limit=9))
    assert list(checkpoints(tmp_path / "out")) == [1, 2, 3, 4]
    train(config(checkpoint, tmp_path / "none", data, max_steps=4, save_steps=0, save_minutes=10))
    assert list(checkpoints(tmp_path / "none")) == [4], "the end alone"


@pytest.mark.parametrize("harm", ["cut", "gone", "junk"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, data, capsys, harm):
    """Pins: resuming from a file that a full disk or a copy cut off, with a traceback or with other weights."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    out = tmp_path / "out"
    train(config(checkpoint, out, data, max_steps=6, save_steps=2))
    whole = weights(out)
    spoilt = out / "checkpoints" / "checkpoint-6"
    if harm == "cut":
        (spoilt / "optimizer.pt").write_bytes((spoilt / "optimizer.pt").read_bytes()[:1000])
    elif harm == "gone":
        (spoilt / "model.safetensors").unlink()
    else:
        (spoilt / COMPLETE_FILE).write_text("")
    capsys.readouterr()
    train(config(checkpoint, out, data, max_steps=6, save_steps=2, resume=True))
    told = capsys.readouterr().err
    assert "damaged" in told
    assert "resuming from step 4" in told
    assert all(torch.equal(whole[k], v) for k, v in weights(out).items())


def test_a_checkpoint_is_on_the_disk_before_it_is_called_whole(tmp_path, monkeypatch):
    """Bug: power lost after the mark was written: a checkpoint that passes for whole with zeros for weights."""
    checkpoint = tmp_path / "checkpoints" / "checkpoint-3"
    (checkpoint / "shards").mkdir(parents=True)
    for name in ("model.safetensors", "shards/0.distcp"):
        (checkpoint / name).write_text(name)
    done = []

    def fsync(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append(path.name)
        if path.is_dir():
            raise OSError(22, "not for folders here")

    replace = os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replaced"), replace(a, b)))
    complete(checkpoint, {"budget": 1})
    before = done[: done.index("replaced")]
    assert {"model.safetensors", "shards", "0.distcp", "checkpoint-3"} < set(before)
    assert before[-1] == f".{COMPLETE_FILE}"
    assert done[-2:] == ["checkpoint-3", "checkpoints"]
    assert last_checkpoint(tmp_path) == checkpoint
