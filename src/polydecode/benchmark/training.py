"""Training speed of a checkpoint's method against plain fine-tuning of the same model, in one process and in turns.

The baseline is `transformers.Trainer` on the wrapped model's own forward with labels, as anybody would fine-tune it: all
parameters trained, the logits of all tokens at once. The method trains what it trains by default. Both get the same rows,
the same number of tokens per step, dtype, optimiser and clipping, and the clock counts whole steps: data, noise, forward,
backward, optimiser. Each turn starts with one step that is not counted.

Legend: B rows, T tokens.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from polydecode.benchmark.machine import Machine
from polydecode.config import TrainConfig
from polydecode.data import Collator, Example, Examples
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder
from polydecode.train import DecoderTrainer, prepare_parameters
from polydecode.train.arguments import training_arguments
from polydecode.train.progress import ProgressReport

PLAIN = "transformers Trainer"


@dataclass
class TrainingSpeed:
    """Tokens of the data per second, over the rounds: `ratio` is the median of the rounds' quotients to the baseline."""

    name: str
    trained_parameters: int
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    ratio: float
    ratio_min: float
    ratio_max: float
    seconds: list[float]


def measure_training(
    model: ParallelDecoder,
    tokenizer: Any,
    batch_size: int,
    prompt_tokens: int,
    answer_tokens: int,
    steps: int,
    repeats: int,
    dtype: str = "float32",
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> list[TrainingSpeed]:
    """The baseline's speed and the method's, each over `repeats` turns of `steps` counted steps on random tokens.

    `prompt_tokens` 0 is plain text. The model's weights change a little (learning rate 1e-7). Raises `UserError` for counts
    below 1 and rows beyond the context.
    """
    _check(model, batch_size, prompt_tokens, answer_tokens, steps, repeats)
    examples = Examples(random_examples(model, batch_size * (steps + 1), prompt_tokens, answer_tokens, seed))
    tokens = batch_size * (prompt_tokens + answer_tokens) * steps
    seconds: dict[str, list[float]] = {PLAIN: [], model.config.method: []}
    trained: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            checkpoint="-",
            out=str(Path(folder) / "out"),
            data=["-"],
            batch_size=batch_size,
            max_steps=steps + 1,
            learning_rate=1e-7,
            schedule="constant",
            dtype=dtype,
            log_steps=10 * steps,
            seed=seed,
            report_to="none",
            spike_factor=0.0,
        )
        for number in range(repeats):
            for name, run in ((PLAIN, _plain), (model.config.method, partial(_method, tokenizer))):
                seconds[name].append(run(model, config, examples))
                trained[name] = sum(p.numel() for p in model.parameters() if p.requires_grad)
                gc.collect()
            progress(f"round {number + 1} of {repeats}: " + ", ".join(f"{n} {s[-1]:.2f} s" for n, s in seconds.items()))
    return [_summary(name, trained[name], seconds, tokens) for name in seconds]


def random_examples(
    model: ParallelDecoder, rows: int, prompt_tokens: int, answer_tokens: int, seed: int
) -> list[Example]:
    """Rows of random tokens, the first `prompt_tokens` of each its prompt."""
    generator = torch.Generator().manual_seed(seed)
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (rows, prompt_tokens + answer_tokens), generator=generator).tolist()
    is_prompt = [True] * prompt_tokens + [False] * answer_tokens
    return [Example(row, is_prompt, [not p for p in is_prompt], i) for i, row in enumerate(ids)]


class _StepTimes(TrainerCallback):
    """When each optimiser step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def _method(tokenizer: Any, model: ParallelDecoder, config: TrainConfig, examples: Examples) -> float:
    model.requires_grad_(True)
    prepare_parameters(model, config)
    return _timed(DecoderTrainer(model, config, examples, None, tokenizer))


def _plain(model: ParallelDecoder, config: TrainConfig, examples: Examples) -> float:
    base: Any = model.base
    base.requires_grad_(True)
    arguments = training_arguments(config, has_eval=False, layer_class="")
    return _timed(Trainer(model=base, args=arguments, train_dataset=examples, data_collator=_with_labels))


def _timed(trainer: Trainer) -> float:
    """Seconds of all steps but the first."""
    for callback in (PrinterCallback, ProgressCallback, ProgressReport):
        trainer.remove_callback(callback)
    clock = _StepTimes()
    trainer.add_callback(clock)
    trainer.train()
    assert trainer.model is not None
    trainer.model.zero_grad()
    trainer.model.eval()
    return clock.ends[-1] - clock.ends[0]


def _with_labels(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch as transformers' own models take it: the tokens to predict as labels, -100 elsewhere."""
    batch = Collator(0)(examples)
    labels_BT = batch["input_ids"].masked_fill(~batch["loss_mask"], -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels_BT}


def _summary(name: str, trained: int, seconds: dict[str, list[float]], tokens: int) -> TrainingSpeed:
    speeds = [tokens / s for s in seconds[name]]
    ratios = [plain / own for plain, own in zip(seconds[PLAIN], seconds[name], strict=True)]
    return TrainingSpeed(
        name=name,
        trained_parameters=trained,
        tokens_per_s=median(speeds),
        tokens_per_s_min=min(speeds),
        tokens_per_s_max=max(speeds),
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        seconds=seconds[name],
    )


def _check(model: ParallelDecoder, rows: int, prompt: int, answer: int, steps: int, repeats: int) -> None:
    counts = {"batch_size": rows, "new_tokens": answer, "train_steps": steps, "repeats": repeats}
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} is {value}; it must be 1 or more")
    context = model.config.max_position_embeddings
    if prompt < 0 or prompt + answer > context:
        raise UserError(f"rows of {prompt} + {answer} tokens do not fit the model's context of {context}")


def as_rows(speeds: list[TrainingSpeed]) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of the table."""
    columns = ["training", "trained parameters", "tokens/s", "min-max", "ratio", "min-max"]
    return columns, [
        [
            s.name,
            f"{s.trained_parameters:,}",
            f"{s.tokens_per_s:.1f}",
            f"{s.tokens_per_s_min:.1f}-{s.tokens_per_s_max:.1f}",
            f"{s.ratio:.2f}",
            f"{s.ratio_min:.2f}-{s.ratio_max:.2f}",
        ]
        for s in speeds
    ]


def heading(setup: dict[str, Any], machine: Machine) -> str:
    """What was measured on what."""
    return (
        f"{setup['checkpoint']}: training, {setup['dtype']}, {setup['batch_size']} rows of {setup['prompt_tokens']} prompt "
        f"and {setup['answer_tokens']} answer tokens, median of {setup['repeats']} turns of {setup['steps']} steps\n"
        f"{machine.device_name} ({machine.device}, {machine.threads} threads), torch {machine.torch}, "
        f"transformers {machine.transformers}, polydecode {machine.polydecode}\n"
        "tokens/s counts the data's tokens, prompts included; the baseline trains all parameters by next-token loss"
    )


def as_json(setup: dict[str, Any], machine: Machine, speeds: list[TrainingSpeed]) -> dict[str, Any]:
    """Everything measured."""
    return {**setup, "machine": asdict(machine), "results": [asdict(s) for s in speeds]}
