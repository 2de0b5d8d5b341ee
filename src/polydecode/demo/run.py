"""The demo: SmolLM2-135M, an AR control and conversions of it, trained on the same data for the same number of tokens.

Training from scratch takes longer than a demo may, so the demo starts from adapters that were trained by the commands in
EXPERIMENTS.md, goes on training each here for the same number of tokens, and measures what comes out. With `--from-scratch`
it starts from the pretrained model instead.
"""

import json
import sys
import time
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Conversion:
    """A method in the demo: what it starts from without an adapter ("control": the trained AR control), its settings, and the
    ways to decode it, by their name in the table."""

    method: str
    source: str
    settings: dict[str, Any]
    ways: dict[str, dict[str, Any]]


CONVERSIONS = (
    Conversion(
        "dmtd",
        SOURCE,
        {
            "num_encoding_layers": 6,
            "num_decoding_layers": 8,
            "cycle_length": 3,
            "training_cycle_lengths": [1, 2, 3, 4],
        },
        {f"dmtd cycle {c}": {"cycle_length": c} for c in (1, 2, 3, 4)},
    ),
    Conversion(
        "block_diffusion",
        "control",
        {"block_size": 8, "noise_draws": 4, "mask_token_id": 16},
        {
            "blocks, one by one": {"threshold": None},
            **{f"blocks, threshold {t}": {"threshold": t} for t in (0.999, 0.95, 0.8)},
        },
    ),
)
HELD_OUT_SEED = 2
LIVE_SEED = 3
LIVE_SHARES = 6
"""Parts of the live training time; the control gets one, and a pass of block diffusion costs several passes of it."""
CONTROL_ROWS = ("source (AR)", "AR control")


def run(config: DemoConfig) -> dict[str, Any]:
    """Run the demo; the results as one JSON-able object, also written to `out`."""
    if config.budget <= 0 or config.eval_items < 3 or config.timed_items < 3 or config.repeats < 1:
        raise UserError("budget must be above 0, eval_items and timed_items at least 3, and repeats at least 1")
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    _say(f"loading {SOURCE}")
    tokenizer = load_tokenizer(SOURCE)
    training = list(items(LIVE_SEED, 20000))
    questions = held_out(HELD_OUT_SEED, config.eval_items, {i.prompt for i in [*training, *items(1, 60000)]})
    write_jsonl(out / "train.jsonl", training)
    write_jsonl(out / "held_out.jsonl", questions)

    _check_adapters(config)
    start = SOURCE if config.from_scratch else str(Path(config.adapters) / "control")
    control, trained_control = _train(start, out, "control", minutes=config.budget / LIVE_SHARES)
    tokens = trained_control["tokens"]
    trained: dict[str, Any] = {"control": trained_control}
    ways: dict[str, tuple[ParallelDecoder, dict[str, Any]]] = {
        CONTROL_ROWS[0]: (load(SOURCE, dtype=torch.float32), {}),
        CONTROL_ROWS[1]: (control, {}),
    }
    for conversion in CONVERSIONS:
        model, trained[conversion.method] = _train(
            _start(config, conversion, out), out, conversion.method, tokens=tokens
        )
        ways |= {name: (model, options) for name, options in conversion.ways.items()}
    rows = _measure(config, tokenizer, questions, ways)
    result = {
        "rows": [r.as_json() for r in rows],
        "live_training": {"tokens_each": tokens, **trained},
        "started_from": "pretrained" if config.from_scratch else "adapters",
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    print(table(rows), "\n")
    print(samples(questions, rows), "\n")
    _write(out, rows, result)
    return result


def _say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


def _check_adapters(config: DemoConfig) -> None:
    for name in ("control", *(c.method for c in CONVERSIONS)):
        if not config.from_scratch and not (Path(config.adapters) / name / "config.json").is_file():
            raise UserError(
                f"no adapter {str(Path(config.adapters) / name)!r}; give --adapters FOLDER or --from-scratch"
            )


def _start(config: DemoConfig, conversion: Conversion, out: Path) -> str:
    """The checkpoint that live training of a conversion starts from."""
    if not config.from_scratch:
        return str(Path(config.adapters) / conversion.method)
    folder = out / f"{conversion.method}_start"
    source = str(out / "control") if conversion.source == "control" else conversion.source
    model = convert(source, method=conversion.method, dtype=torch.float32, **conversion.settings)
    save_checkpoint(model, load_tokenizer(SOURCE), folder, overwrite=True)
    return str(folder)


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
            train_embeddings=False,
            train_norms=False,
            learning_rate=3e-4,
            max_minutes=minutes,
            max_tokens=tokens,
            log_steps=5,
        )
    )
    return load(str(folder), dtype=torch.float32), metrics


def _measure(
    config: DemoConfig,
    tokenizer: Any,
    questions: list[Item],
    ways: dict[str, tuple[ParallelDecoder, dict[str, Any]]],
) -> list[Row]:
    answers = {}
    for name, (model, options) in ways.items():
        _say(f"answering {len(questions)} held-out items: {name}")
        answers[name] = answer_all(model, tokenizer, questions, **options)
    _say("timing, bfloat16, batch 1")
    for model in {id(model): model for model, _ in ways.values()}.values():
        cast_parameters(model, torch.bfloat16)
    timed = speeds(ways, tokenizer, questions[: config.timed_items], config.repeats)
    rows = [
        Row(name, ways[name][0].config.method, accuracy(questions, answers[name]), *timed[name], answers=answers[name])
        for name in ways
    ]
    reference = rows[1]
    for row in rows[1:]:
        row.is_converted = row.name not in CONTROL_ROWS
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
