"""The output folder: one run at a time, nothing of a dead run in a new one, one line for what cannot be written."""

import errno
import multiprocessing
import os
import signal
import time

import pytest
import torch

from polydecode.errors import UserError
from polydecode.train import train
from polydecode.train import trainer as trainer_module
from polydecode.train.folder import alone_in, may_start
from polydecode.train.resume import checkpoints
from polydecode.train.trainer import DecoderTrainer
from test_train_resume import config, data, make_checkpoint, weights

__all__ = ["data"]


def in_a_process(what, *arguments, code=0):
    child = multiprocessing.get_context("fork").Process(target=what, args=arguments)
    child.start()
    child.join(120)
    assert child.exitcode == code


def die_at(step, settings):
    whole = DecoderTrainer.compute_loss

    def deadly(self, *args, **kwargs):
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *args, **kwargs)

    DecoderTrainer.compute_loss = deadly
    train(settings)


def test_nothing_of_a_dead_run_is_in_a_new_one(tmp_path, data):
    """Pins: the best weights of a killed run, written as those of the next one in the same folder; its samples and log too."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    watched = {"keep": "best", "eval_steps": 1, "eval_fraction": 0.3, "eval_samples": 1, "save_steps": 0}
    dead = config(checkpoint, tmp_path / "out", data, max_steps=30, **watched)
    in_a_process(die_at, 12, dead, code=-signal.SIGKILL)
    assert list((tmp_path / "out" / "checkpoints" / "best").glob("step-*"))
    short = {"max_steps": 3, "learning_rate": 1e-7, **watched}
    here = train(config(checkpoint, tmp_path / "out", data, **short))
    clean = train(config(checkpoint, tmp_path / "clean", data, **short))
    assert here["eval_loss"] == clean["eval_loss"]
    a, b = weights(tmp_path / "out"), weights(tmp_path / "clean")
    assert all(torch.equal(a[k], b[k]) for k in a)
    for name in ("samples.jsonl", "log.jsonl"):
        count = [len((tmp_path / out / name).read_text().splitlines()) for out in ("out", "clean")]
        assert count[0] == count[1]


@pytest.mark.parametrize("killed_at", [5, 7])
def test_the_best_survives_a_kill(tmp_path, data, killed_at, monkeypatch):
    """Pins: a resumed run whose best is of steps that it has not made, or that forgets the one from before its checkpoint."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 4.0, 5: 0.9, 6: 0.8, 7: 3.0, 8: 3.0, 0: 9.0}
    whole = DecoderTrainer._held_out_metrics

    def told(self, *args):
        return whole(self, *args) | {"eval_loss": losses[self.state.global_step]}

    monkeypatch.setattr(DecoderTrainer, "_held_out_metrics", told)
    settings = {"keep": "best", "eval_steps": 1, "eval_fraction": 0.3, "save_steps": 4, "schedule": "constant"}
    out = tmp_path / "out"
    in_a_process(die_at, killed_at, config(checkpoint, out, data, max_steps=8, **settings), code=-signal.SIGKILL)
    kept = sorted(f.name for f in (out / "checkpoints" / "best").glob("step-*"))
    assert "step-2.safetensors" in kept, "the best as of checkpoint 4"
    assert len(kept) == 2
    metrics = train(config(checkpoint, out, data, max_steps=4, resume=True, **settings))
    assert metrics["best_step"] == 2, "steps 5 and 6 are not of this run"
    metrics = train(config(checkpoint, tmp_path / "whole", data, max_steps=8, **settings))
    assert metrics["best_step"] == 6


def hold(out, held, done):
    with alone_in(out, fresh=True):
        child = os.fork()  # as a data worker is
        if child == 0:
            time.sleep(60)
            os._exit(0)
        held.put(child)
        done.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)


def test_two_runs_do_not_share_a_folder(tmp_path, data):
    """Pins: two trainings that rotate each other's checkpoints away, both with exit code 0; a lock that a killed run's data
    workers hold on."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    out = tmp_path / "out"
    context = multiprocessing.get_context("fork")
    held, done = context.Queue(), context.Event()
    other = context.Process(target=hold, args=(out, held, done))
    other.start()
    worker = held.get(timeout=60)
    try:
        with pytest.raises(UserError, match="another run is training into"):
            train(config(checkpoint, out, data, max_steps=1))
        assert [f.name for f in out.iterdir()] == [".lock"], "nothing was written"
        done.set()
        other.join(60)
        train(config(checkpoint, out, data, max_steps=1))
    finally:
        os.kill(worker, signal.SIGKILL)
    assert not (out / ".lock").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_last_evaluation_loses_nothing(tmp_path, data, number, monkeypatch, capsys):
    """Pins: Ctrl-C while the result is evaluated or written, and hours of training are gone."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    whole = DecoderTrainer.evaluate

    def interrupted(self, *args, **kwargs):
        os.kill(os.getpid(), number)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(DecoderTrainer, "evaluate", interrupted)
    metrics = train(config(checkpoint, tmp_path / "out", data, max_steps=2, save_steps=0, eval_fraction=0.3))
    assert metrics["interrupted"]
    assert "the checkpoint will be written" in capsys.readouterr().err
    assert weights(tmp_path / "out")


def test_a_kill_in_the_last_write_may_start_anew_or_go_on(tmp_path, data, monkeypatch):
    """Pins: a folder that can neither be resumed nor used again."""
    import polydecode.train as train_module

    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")

    def die(settings):
        train_module.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        train(settings)

    train(config(checkpoint, tmp_path / "whole", data, max_steps=2))
    for save_steps in (0, 1):
        out = tmp_path / f"out-{save_steps}"
        settings = {"max_steps": 2, "save_steps": save_steps}
        # the first `os.replace` of polydecode.train itself is the one of the result
        monkeypatch.setattr(train_module, "os", type("Os", (), dict(vars(os))))
        in_a_process(die, config(checkpoint, out, data, **settings), code=-signal.SIGKILL)
        assert (out / ".finished").exists()
        (out / "..finished.partial-x").mkdir()
        assert may_start(out) == (save_steps == 0)
        metrics = train(config(checkpoint, out, data, resume=bool(save_steps), **settings))
        assert metrics["steps"] == 2
        a, b = weights(out), weights(tmp_path / "whole")
        assert all(torch.equal(a[k], b[k]) for k in a), "no step more than there are"
        assert not [f for f in out.iterdir() if "finished" in f.name or f.name == ".lock"]


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path, data, monkeypatch):
    """Pins: Ctrl-C between two checkpoints after which steps are made again, or nothing can be resumed at all."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    whole = DecoderTrainer.compute_loss

    def stopped(self, *args, **kwargs):
        if self.state.global_step == 2 and not self.interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(self, *args, **kwargs)

    settings = {"max_steps": 6, "save_steps": 100}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderTrainer, "compute_loss", stopped)
        assert train(config(checkpoint, tmp_path / "out", data, **settings))["steps"] == 3
    assert list(checkpoints(tmp_path / "out")) == [3]
    train(config(checkpoint, tmp_path / "out", data, resume=True, **settings))
    train(config(checkpoint, tmp_path / "whole", data, **settings))
    a, b = weights(tmp_path / "out"), weights(tmp_path / "whole")
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("place", ["file/x", "file", "dangling", "n" * 300, "nul\0", "/proc/x"])
def test_an_output_that_cannot_be_a_folder_is_one_line(tmp_path, data, place):
    """Pins: tracebacks of half a dozen errnos."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    with pytest.raises(UserError) as error:
        train(config(checkpoint, tmp_path / place, data, max_steps=1))
    assert "\n" not in str(error.value)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "words", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")]
)
def test_a_full_disk_names_the_last_checkpoint(tmp_path, data, words, monkeypatch):
    """Pins: torch's and safetensors' words for a full disk as a traceback."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    whole = trainer_module.DecoderTrainer._save_optimizer_and_scheduler

    def full(self, folder):
        if self.state.global_step == 4:
            raise words
        whole(self, folder)

    monkeypatch.setattr(trainer_module.DecoderTrainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(UserError, match=r"no room left .*; the last whole checkpoint is .*checkpoint-2"):
        train(config(checkpoint, tmp_path / "out", data, max_steps=6, save_steps=2))


@pytest.mark.parametrize("content", ["junk", "[]", "{}", '{"settings": {}}', '{"settings": [], "method_settings": {}}'])
def test_a_run_file_that_is_none_is_one_line(tmp_path, data, content):
    """Pins: KeyError and JSONDecodeError as messages."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    train(config(checkpoint, tmp_path / "out", data, max_steps=2))
    (tmp_path / "out" / "run.json").write_text(content)
    (tmp_path / "out" / "checkpoints" / "checkpoint-x").mkdir()
    (tmp_path / "out" / "checkpoints" / "checkpoint-x" / "progress.json").write_text("{}")
    with pytest.raises(UserError, match="is not what a run writes"):
        train(config(checkpoint, tmp_path / "out", data, max_steps=3, resume=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": -1}, {"seed": 2**70}, {"adam_beta1": 2.0}, {"adam_beta2": -1.0}, {"max_eval_examples": -1},
        {"data_weights": [1e308, 1e308]}, {"keep": "best", "eval_steps": 1, "eval_fraction": 0.0},
    ],
)  # fmt: skip
def test_settings_that_libraries_would_refuse(changes):
    """Pins: numpy's, torch's and Python's own words for a wrong setting."""
    from polydecode.config import TrainConfig

    given = {"checkpoint": "c", "out": "o", "data": ["a"] * len(changes.get("data_weights", [0]))} | changes
    with pytest.raises(UserError, match="|".join(changes)):
        TrainConfig(**given).check()
