"""Sharding as accelerate does it (FSDP2), with processes on the CPU: fsdp_cli.py tells accelerate that it may."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_train_resume import data, make_checkpoint, weights

__all__ = ["data"]
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def run(processes: int, checkpoint: Path, out: Path, data: str, *flags: str) -> list[dict]:
    """The log of a run in so many processes, sharded when there are several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(HERE / "fsdp_cli.py"), "train"]
    settings = "--learning-rate 1e-3 --schedule constant --warmup-ratio 0 --log-steps 1 --batch-size 8 --report-to none"
    done = subprocess.run(
        [*command, str(checkpoint), str(out), "--data", data, *settings.split(), *flags, *(["--fsdp"] * (processes > 1))],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.partition("failed (exitcode")[0][-3000:]
    return json.loads((out / "training_metrics.json").read_text())["log"]


def largest_difference(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@pytest.mark.parametrize("method", ["dmtd", "block_diffusion"])
def test_a_sharded_checkpoint_resumes_on_another_number_of_processes(tmp_path, data, method):
    """Pins: a process that gathers the head once more than another because it has more chunks of tokens, or none (29 examples,
    batch 8: the last process of four gets blank rows alone) - they would wait for one another for ever; a checkpoint that is
    bound to the number of processes; means of means. One process without sharding is the reference."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", method)
    common = ["--eval-fraction", "0", "--save-steps", "3"]
    run(1, checkpoint, tmp_path / "one", data, "--max-steps", "6", *common)
    out = tmp_path / "sharded"
    run(2, checkpoint, out, data, "--max-steps", "3", *common)
    assert any((out / "checkpoints" / "checkpoint-3").rglob("*.distcp"))
    run(4, checkpoint, out, data, "--max-steps", "6", *common, "--resume")
    assert largest_difference(tmp_path / "one", out) < 1e-4


def test_evaluation_and_samples_while_sharded(tmp_path, data):
    """Pins: weights that an evaluation left gathered and were then written as shards; generation that a shard cannot do."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "dmtd")
    flags = "--eval-fraction 0.2 --eval-steps 2 --eval-samples 2 --max-steps 3 --micro-batch-size 2".split()
    logs = [run(n, checkpoint, tmp_path / str(n), data, *flags) for n in (1, 2)]
    one, two = ([line["eval_loss"] for line in log if "eval_loss" in line] for log in logs)
    assert len(one) >= 2
    assert one == pytest.approx(two, abs=1e-4)
    assert largest_difference(tmp_path / "1", tmp_path / "2") < 1e-4
    answers = [(tmp_path / n / "samples.jsonl").read_text() for n in ("1", "2")]
    assert answers[0] == answers[1]


def test_adapters_and_distillation_while_sharded(tmp_path, data):
    """Pins: adapters sharded apart from the layers they belong to; a source that is gathered by one process only."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "block_diffusion")
    flags = [
        "--eval-fraction",
        "0",
        "--max-steps",
        "3",
        "--lora-rank",
        "4",
        "--distill-weight",
        "0.5",
        "--distill-top-k",
        "8",
    ]
    flags += ["--distill-source", str(make_checkpoint(tmp_path / "source", "autoregressive"))]
    for n in (1, 2):
        run(n, checkpoint, tmp_path / str(n), data, *flags)
    assert largest_difference(tmp_path / "1", tmp_path / "2") < 1e-4
