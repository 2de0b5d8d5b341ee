"""Resuming a run: which checkpoint is whole, and whether it is still the same run.

`run.json` in the output folder says at the start what the run is: its settings, the method's settings, the tokenizer and the
data. A resumed run must agree with it in everything that its losses depend on.
"""

import hashlib
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from polydecode.config import TrainConfig
from polydecode.data import Examples, ExampleStream, data_fingerprint
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder
from polydecode.train.checks import LOOKBACK

RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
COMPLETE_FILE = "progress.json"
"""Written last into a checkpoint, with the size of every other file: a folder without it was cut off in the writing."""

MAY_CHANGE = {
    "checkpoint", "out", "data", "eval_data", "max_steps", "epochs", "max_minutes", "max_tokens", "log_steps", "eval_steps",
    "eval_samples", "max_eval_examples", "save_steps", "save_minutes", "save_total_limit", "save_dtype", "report_to",
    "micro_batch_size",
    "gradient_checkpointing", "data_workers", "no_cache", "keep", "resume", "spike_factor",
}  # fmt: skip
"""Settings that a resumed run may change. (Paths may: what they hold is compared by content.)"""


def step_of(checkpoint: Path) -> int:
    """The step a checkpoint folder is of."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def complete(checkpoint: Path, progress: dict[str, Any]) -> None:
    """Mark a checkpoint as whole, with the run's `progress` and the sizes of its files. They are on the disk before the mark
    is: a machine that loses its power may otherwise keep the mark and the sizes, and zeros for the weights."""
    found = sorted(checkpoint.rglob("*"))
    files = {str(f.relative_to(checkpoint)): f.stat().st_size for f in found if f.is_file()}
    for path in (*found, checkpoint):
        _to_disk(path)
    aside = checkpoint / f".{COMPLETE_FILE}"
    aside.write_text(json.dumps({**progress, "files": files}))
    _to_disk(aside)
    os.replace(aside, checkpoint / COMPLETE_FILE)
    for folder in (checkpoint, checkpoint.parent):
        _to_disk(folder)


def _to_disk(path: Path) -> None:
    """Wait until the disk has it. (Some file systems cannot be asked that of a folder.)"""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint that was whole once: a file that is gone or of another size; empty when nothing is."""
    try:
        files = json.loads((checkpoint / COMPLETE_FILE).read_text())["files"].items()
    except (ValueError, AttributeError, KeyError, TypeError):
        return f"{COMPLETE_FILE} is not what a run writes"
    for name, size in files:
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is gone"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
    return ""


def checkpoints(out: Path) -> dict[int, Path]:
    """The checkpoints of the run in `out` that were written to their end, by step, in order."""
    folders = [c for c in (out / "checkpoints").glob("checkpoint-*") if c.name.rsplit("-", 1)[1].isdecimal()]
    found = {step_of(c): c for c in folders if (c / COMPLETE_FILE).is_file()}
    return dict(sorted(found.items()))


def last_checkpoint(out: Path, until: int | None = None) -> Path:
    """The newest whole checkpoint of the run in `out`, of step `until` at most; damaged ones are passed over with a warning.
    `UserError` when there is none."""
    for step, checkpoint in reversed(checkpoints(out).items()):
        if until is not None and step > until:
            continue
        wrong = damage(checkpoint)
        if not wrong:
            return checkpoint
        print(f"polydecode: warning: {str(checkpoint)!r} is damaged ({wrong}) and is passed over", file=sys.stderr)
    raise UserError(
        f"nothing to resume: {str(out / 'checkpoints')!r} holds no whole checkpoint (they come by --save-steps)"
    )


def rotate(out: Path, limit: int, now: int) -> None:
    """Delete all whole checkpoints but the newest `limit`, the newest from before the last `LOOKBACK` steps, and the one that
    will be it next."""
    found = checkpoints(out)
    before, since = ([s for s in found if (s <= now - LOOKBACK) == old] for old in (True, False))
    kept = {*list(found)[-limit:], *before[-1:], *since[:1]}
    for step in found.keys() - kept:
        shutil.rmtree(found[step])


def versions() -> dict[str, str]:
    """The versions of what a run's numbers depend on, and the machine."""
    packages = ("polydecode", "torch", "transformers", "accelerate", "peft")
    return {p: metadata.version(p) for p in packages} | {"machine": f"{platform.machine()} {os.cpu_count()} cores"}


def description(
    config: TrainConfig, model: ParallelDecoder, tokenizer: Any, training: Examples | ExampleStream
) -> dict[str, Any]:
    """What the run is, as JSON."""
    return {
        "settings": asdict(config),
        "method": model.config.method,
        "method_settings": json.loads(json.dumps(model.config.settings())),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "weights": weights_fingerprint(model),
        "data": data_fingerprint(training),
        "versions": versions(),
    }


def weights_fingerprint(model: ParallelDecoder) -> str:
    """A hash of every parameter's name, shape and 64 of its values, spread evenly; of those the run starts from."""
    digest = hashlib.sha256()
    for name, parameter in model.base.named_parameters():
        if "lora_" in name:  # drawn anew in every process
            continue
        flat = parameter.detach().flatten()
        some = flat[:: max(flat.numel() // 64, 1)].float().cpu()
        digest.update(f"{name.replace('.base_layer', '')}{tuple(parameter.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of the vocabulary, the special tokens and the chat template."""
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write_run(out: Path, run: dict[str, Any]) -> None:
    """Keep the description in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    aside = out / f".{RUN_FILE}"
    aside.write_text(json.dumps(run, indent=1))
    os.replace(aside, out / RUN_FILE)


def check_same_run(out: Path, run: dict[str, Any]) -> list[str]:
    """Refuse, by name, what differs from the run in `out`; what may differ and does is given back, a phrase each."""
    file = out / RUN_FILE
    if not file.is_file():  # a run of an earlier version
        return []
    try:
        old = json.loads(file.read_text())
        if not all(isinstance(old[group], dict) for group in ("method_settings", "settings")):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"cannot resume: {str(file)!r} is not what a run writes; delete it to resume without a check"
        ) from None
    mends = {
        "method": "resume with the checkpoint it was started from",
        "tokenizer": "resume with the tokenizer it was started with",
        "weights": "resume with the checkpoint it was started from",
        "data": "resume with the same data in the same order",
    }
    for name, mend in mends.items():
        if old.get(name) != run[name]:
            raise UserError(f"cannot resume: {name} was {old[name]}, now it is {run[name]}; {mend}")
    changed = []
    for group in ("method_settings", "settings"):
        for name in sorted(old[group].keys() | run[group].keys()):
            before, now = old[group].get(name), run[group].get(name)
            if before == now:
                continue
            if group == "settings" and name in MAY_CHANGE:
                changed.append(f"{name} {before!r} -> {now!r}")
            else:
                raise UserError(
                    f"cannot resume: {name} was {before!r}, now it is {now!r}; give the old value, or start anew"
                )
    return changed
