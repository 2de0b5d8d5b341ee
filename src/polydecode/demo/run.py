"""The demo: SmolLM2-135M, an AR control and a DMTD conversion of it, trained on the same data for the same number of tokens.

Training from scratch takes longer than a demo may, so the demo starts from two adapters that were trained by the commands
in EXPERIMENTS.md, goes on training both here for the same number of tokens, and measures what comes out. With
`--from-scratch` it starts from the pretrained model instead.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from polydecode.auto import load, load_tokenizer
from polydecode.auto.loading import cast_parameters
from polydecode.config import TrainConfig
from polydecode.convert import convert, save_checkpoint
from polydecode.demo.measure import Row, accuracy, answer_all, speeds
from polydecode.demo.report import picture, samples, table
from polydecode.demo.settings import DemoConfig
from polydecode.demo.tasks import Item, held_out, items, write_jsonl
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder
from polydecode.train import train

SOURCE = "smollm2-135m"
METHOD = "dmtd"
SPLIT: dict[str, Any] = {
    "num_encoding_layers": 6,
    "num_decoding_layers": 8,
    "cycle_length": 3,
    "training_cycle_lengths": [1, 2, 3, 4],
}
CYCLE_LENGTHS = (1, 2, 3, 4)
HELD_OUT_SEED = 2
LIVE_SEED = 3


def run(config: DemoConfig) -> dict[str, Any]:
    """Run the demo; the results as one JSON-able object, also written to `out`."""
    if config.budget <= 0 or config.eval_items < 3 or config.new_tokens < 8 or config.repeats < 1:
        raise UserError("budget must be above 0, eval_items at least 3, new_tokens at least 8 and repeats at least 1")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    _say(f"loading {SOURCE}")
    tokenizer = load_tokenizer(SOURCE)
    training = list(items(LIVE_SEED, 20000))
    questions = held_out(HELD_OUT_SEED, config.eval_items, {i.prompt for i in [*training, *items(1, 60000)]})
    write_jsonl(out / "train.jsonl", training)
    write_jsonl(out / "held_out.jsonl", questions)

    control_start, converted_start = _starts(config, out)
    control, trained_control = _train(control_start, out, "control", minutes=config.budget / 2)
    tokens = trained_control["tokens"]
    converted, trained_converted = _train(converted_start, out, METHOD, tokens=tokens)
    rows = _measure(config, tokenizer, questions, control, converted)
    result = {
        "rows": [r.as_json() for r in rows],
        "live_training": {"tokens_each": tokens, "control": trained_control, METHOD: trained_converted},
        "started_from": "pretrained" if config.from_scratch else "adapters",
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    print(table(rows), "\n")
    print(samples(questions, rows), "\n")
    _write(out, rows, result)
    return result


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def _starts(config: DemoConfig, out: Path) -> tuple[str, str]:
    """The two checkpoints that live training starts from."""
    if not config.from_scratch:
        folder = Path(config.adapters)
        for name in ("control", METHOD):
            if not (folder / name / "config.json").is_file():
                raise UserError(f"no adapter {str(folder / name)!r}; give --adapters FOLDER or --from-scratch")
        return str(folder / "control"), str(folder / METHOD)
    converted = out / "converted"
    if not converted.exists():
        save_checkpoint(convert(SOURCE, method=METHOD, **SPLIT), load_tokenizer(SOURCE), converted)
    return SOURCE, str(converted)


def _train(
    start: str, out: Path, name: str, minutes: float = 0.0, tokens: int = 0
) -> tuple[ParallelDecoder, dict[str, Any]]:
    """Train `start` for the given budget and load the result."""
    _say(f"training {name} from {start} for {f'{minutes:g} minutes' if minutes else f'{tokens} tokens'}")
    folder = out / name
    if folder.exists():
        import shutil

        shutil.rmtree(folder)
    metrics = train(
        TrainConfig(
            checkpoint=start,
            out=str(folder),
            data=[str(out / "train.jsonl")],
            eval_data=[str(out / "held_out.jsonl")],
            max_eval_examples=60,
            batch_size=32,
            lora_rank=16,
            learning_rate=3e-4,
            max_minutes=minutes,
            max_tokens=tokens,
            log_steps=5,
        )
    )
    return load(str(folder), dtype=torch.float32), metrics


def _measure(
    config: DemoConfig, tokenizer: Any, questions: list[Item], control: ParallelDecoder, converted: ParallelDecoder
) -> list[Row]:
    source = load(SOURCE, dtype=torch.float32)
    ways: dict[str, tuple[ParallelDecoder, dict[str, Any]]] = {
        "source (AR)": (source, {}),
        "AR control": (control, {}),
        **{f"dmtd cycle {c}": (converted, {"cycle_length": c}) for c in CYCLE_LENGTHS},
    }
    answers = {}
    for name, (model, options) in ways.items():
        _say(f"answering {len(questions)} held-out items: {name}")
        answers[name] = answer_all(model, tokenizer, questions, **options)
    _say("timing, bfloat16, batch 1")
    for model in (source, control, converted):
        cast_parameters(model, torch.bfloat16)
    prompt = torch.tensor([tokenizer(" ".join(q.prompt for q in questions[:9]))["input_ids"][:64]])
    timed = speeds(ways, prompt, config.new_tokens, config.repeats)
    rows = [Row(name, accuracy(questions, answers[name]), *timed[name], answers=answers[name]) for name in ways]
    reference = rows[1]
    for row in rows[1:]:
        row.is_converted = ways[row.name][0] is converted
        row.speedup = row.tokens_per_s / reference.tokens_per_s
        row.kept = row.accuracy["all"] / max(reference.accuracy["all"], 1e-9)
    return rows


def _write(out: Path, rows: list[Row], result: dict[str, Any]) -> None:
    (out / "table.txt").write_text(table(rows) + "\n")
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    try:
        picture(rows, out / "table.png")
        _say(f"wrote {out / 'table.png'}, {out / 'table.txt'} and {out / 'result.json'}")
    except ImportError:
        _say("no picture: matplotlib is not installed (pip install 'polydecode[demo]')")
