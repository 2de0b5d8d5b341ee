"""Training speed of a checkpoint's method against plain fine-tuning of the same model, in one process and in turns.

The baseline is `transformers.Trainer` on the wrapped model's own forward with labels, as anybody would fine-tune it: all
parameters trained, the logits of all tokens at once. The method trains what it trains by default. Both get the same rows,
the same number of tokens per step, dtype, optimiser and clipping, and the clock counts whole steps: data, noise, forward,
backward, optimiser. Each turn starts with one step that is not counted.

With data of one's own, rows are as long as the examples, padded to the longest of a batch, and the method is timed a second
time on packed rows: as many of them per step as hold about the same tokens.

Legend: B rows, T tokens.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from polydecode.benchmark.machine import Machine
from polydecode.config import TrainConfig
from polydecode.data import Collator, Example, Examples, PackedExamples
from polydecode.errors import UserError
from polydecode.methods.base import ParallelDecoder
from polydecode.train import DecoderTrainer, prepare_parameters
from polydecode.train.arguments import training_arguments
from polydecode.train.progress import ProgressReport, RunLog

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
    data: Sequence[Example] | None = None,
    max_length: int = 1024,
    progress: Callable[[str], None] = lambda message: None,
) -> list[TrainingSpeed]:
    """The baseline's speed and the method's, each over `repeats` turns of `steps` counted steps on random tokens, or on `data`,
    where packed rows of `max_length` are a third.

    `prompt_tokens` 0 is plain text. The model's weights change a little (learning rate 1e-7). Raises `UserError` for counts
    below 1, rows beyond the context, and data of fewer examples than the steps need.
    """
    needed = batch_size * (steps + 1)
    method = model.config.method
    if data is None:
        _check(model, batch_size, prompt_tokens, answer_tokens, steps, repeats)
        examples = Examples(random_examples(model, needed, prompt_tokens, answer_tokens, seed))
    else:
        _check(model, batch_size, 0, max_length, steps, repeats)
        if len(data) < needed:
            raise UserError(f"the data have {len(data)} examples; {steps} + 1 steps of {batch_size} need {needed}")
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:needed].tolist()
        examples = Examples([data[i] for i in chosen])
    turns: dict[str, Callable[[TrainConfig], tuple[float, int]]] = {
        PLAIN: partial(_plain, model, examples),
        method: partial(_method, model, tokenizer, examples),
    }
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
        configs = dict.fromkeys(turns, config)
        if data is not None:
            packed = PackedExamples(examples, max_length, seed)
            rows = max(len(packed) // (steps + 1), 1)
            name = f"{method}, {rows} packed row{'s' if rows > 1 else ''}"
            turns[name] = partial(_method, model, tokenizer, packed)
            configs[name] = replace(config, batch_size=rows, packing=True, max_length=max_length)
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in turns}
        trained: dict[str, int] = {}
        for number in range(repeats):
            for name, run in turns.items():
                found[name].append(run(configs[name]))
                trained[name] = sum(p.numel() for p in model.parameters() if p.requires_grad)
                gc.collect()
            progress(
                f"round {number + 1} of {repeats}: " + ", ".join(f"{n} {t[-1][0]:.2f} s" for n, t in found.items())
            )
    speeds = {name: [tokens / seconds for seconds, tokens in turn] for name, turn in found.items()}
    return [_summary(name, trained[name], speeds, [s for s, _ in found[name]]) for name in turns]


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


class _Counted:
    """A collator that remembers the tokens of each batch, padding aside."""

    def __init__(self, collator: Any):
        self.collator = collator
        self.tokens: list[int] = []

    def __call__(self, rows: Any) -> Any:
        batch = self.collator(rows)
        self.tokens.append(int(batch["attention_mask"].sum()))
        return batch


def _method(model: ParallelDecoder, tokenizer: Any, examples: Any, config: TrainConfig) -> tuple[float, int]:
    model.requires_grad_(True)
    prepare_parameters(model, config)
    return _timed(DecoderTrainer(model, config, examples, None, tokenizer))


def _plain(model: ParallelDecoder, examples: Examples, config: TrainConfig) -> tuple[float, int]:
    base: Any = model.base
    base.requires_grad_(True)
    arguments = training_arguments(config, has_eval=False, layer_class="")
    return _timed(Trainer(model=base, args=arguments, train_dataset=examples, data_collator=_with_labels))


def _timed(trainer: Trainer) -> tuple[float, int]:
    """Seconds and tokens of all steps but the first."""
    for callback in (PrinterCallback, ProgressCallback, ProgressReport, RunLog):
        trainer.remove_callback(callback)
    clock = _StepTimes()
    trainer.add_callback(clock)
    counted = _Counted(trainer.data_collator)
    trainer.data_collator = counted
    trainer.train()
    assert trainer.model is not None
    trainer.model.zero_grad()
    trainer.model.eval()
    return clock.ends[-1] - clock.ends[0], sum(counted.tokens[1 : len(clock.ends)])


def _with_labels(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch as transformers' own models take it: the tokens to predict as labels, -100 elsewhere."""
    batch = Collator(0)(examples)
    labels_BT = batch["input_ids"].masked_fill(~batch["loss_mask"], -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels_BT}


def _summary(name: str, trained: int, speeds: dict[str, list[float]], seconds: list[float]) -> TrainingSpeed:
    ratios = [own / plain for plain, own in zip(speeds[PLAIN], speeds[name], strict=True)]
    return TrainingSpeed(
        name=name,
        trained_parameters=trained,
        tokens_per_s=median(speeds[name]),
        tokens_per_s_min=min(speeds[name]),
        tokens_per_s_max=max(speeds[name]),
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        seconds=seconds,
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
    rows = f"rows of {setup['prompt_tokens']} prompt and {setup['answer_tokens']} answer tokens"
    if setup["data"]:
        rows = f"examples of {', '.join(setup['data'])}, at most {setup['max_length']} tokens"
    return (
        f"{setup['checkpoint']}: training, {setup['dtype']}, {setup['batch_size']} {rows}, "
        f"median of {setup['repeats']} turns of {setup['steps']} steps\n"
        f"{machine.device_name} ({machine.device}, {machine.threads} threads), torch {machine.torch}, "
        f"transformers {machine.transformers}, polydecode {machine.polydecode}\n"
        "tokens/s counts the data's tokens, prompts included; the baseline trains all parameters by next-token loss"
    )


def as_json(setup: dict[str, Any], machine: Machine, speeds: list[TrainingSpeed]) -> dict[str, Any]:
    """Everything measured."""
    return {**setup, "machine": asdict(machine), "results": [asdict(s) for s in speeds]}
