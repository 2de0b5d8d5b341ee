"""`polydecode benchmark CHECKPOINT`: its speed against its own one-token-per-forward decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jsonargparse import Namespace

from polydecode.cli.device import DecodingOptions, open_model
from polydecode.cli.method_flags import add_generation_options, chosen_options
from polydecode.cli.output import Result, log, table
from polydecode.cli.parser import Parser, options_of
from polydecode.errors import UserError


@dataclass
class BenchmarkOptions(DecodingOptions):
    """What to time.

    Attributes:
        checkpoint: a polydecode checkpoint, or any source.
        prompt_tokens: length of the random prompt.
        prompt: time this text instead of a random prompt.
        new_tokens: new tokens per row; the end token is ignored, so every run makes exactly this many.
        lengths: several output lengths instead of one.
        batch_size: rows decoded at once.
        repeats: rounds; every way to decode runs once in each.
        threads: CPU threads; 0 leaves torch's choice.
        seed: seed of the random prompt.
        training: time training steps instead, against plain fine-tuning of the same model by transformers' Trainer; rows have
            `prompt_tokens` prompt and `new_tokens` answer tokens, dtype auto is float32 (bfloat16 on a GPU).
        data: with --training, examples of these files instead of random rows; packed rows are timed beside them.
        chat: with --data, put prompt/response pairs into the tokenizer's chat template.
        max_length: with --data, longest example and length of packed rows, in tokens.
        training_steps: timed optimiser steps per round, with --training.
    """

    checkpoint: str
    prompt_tokens: int = 128
    prompt: str = ""
    new_tokens: int = 128
    lengths: list[int] = field(default_factory=list)
    batch_size: int = 1
    repeats: int = 5
    threads: int = 0
    seed: int = 0
    training: bool = False
    data: list[str] = field(default_factory=list)
    chat: bool = False
    max_length: int = 1024
    training_steps: int = 3


def make_parser(argv: Sequence[str]) -> Parser:
    summary = "Time a checkpoint against its own one-token-per-forward decoding, in the same process and in turns."
    parser = Parser("benchmark", summary, positionals=("checkpoint",))
    parser.add_options(BenchmarkOptions)
    add_generation_options(parser, as_list=True)
    return parser


def run(values: Namespace) -> Result:
    import torch

    from polydecode.auto import load_tokenizer
    from polydecode.benchmark import report
    from polydecode.benchmark.decoding import check_measure, combinations, measure, random_prompt
    from polydecode.benchmark.machine import describe_machine
    from polydecode.ops.linear import few_rows_route

    options = options_of(BenchmarkOptions, values)
    lengths = options.lengths or [options.new_tokens]
    if not options.training:
        check_measure(options.prompt_tokens, lengths, options.batch_size, options.repeats)
    if options.threads < 0:
        raise UserError(f"threads is {options.threads}; it must be 1 or more, or 0 for torch's choice")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.data and not options.training:
        raise UserError("data are for training steps: give --training as well")
    if options.training:
        return _training(options)
    model = open_model(options.checkpoint, options)
    if options.prompt:
        row = load_tokenizer(options.checkpoint)(options.prompt, return_tensors="pt").input_ids
        prompt = row.expand(options.batch_size, -1)
    else:
        prompt = random_prompt(model, options.batch_size, options.prompt_tokens, options.seed)
    variants = combinations(chosen_options(values))
    summaries = measure(model, prompt, lengths, options.repeats, variants, progress=log)
    setup = {
        "checkpoint": options.checkpoint,
        "method": model.config.method,
        "settings": model.config.settings(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch_size": options.batch_size,
        "prompt_tokens": prompt.shape[1],
        "repeats": options.repeats,
        "few_row_products": few_rows_route(model.dtype) if model.device.type == "cpu" else "torch",
    }
    machine = describe_machine(model.device)
    text = [report.heading(setup, machine), "", table(*report.as_rows(summaries)), *report.notes(summaries)]
    return Result("\n".join(text), {**report.as_json(setup, machine, summaries), "notes": report.notes(summaries)})


def _training(options: BenchmarkOptions) -> Result:
    from polydecode.auto import load, load_tokenizer
    from polydecode.benchmark import training
    from polydecode.benchmark.machine import default_device, describe_machine
    from polydecode.config import DataConfig
    from polydecode.data import load_examples

    device = default_device() if options.device == "auto" else options.device
    dtype = ("bfloat16" if device != "cpu" else "float32") if options.dtype == "auto" else options.dtype
    if dtype == "float16":
        raise UserError("training runs in float32 or bfloat16 (mixed precision); float16 is not supported")
    tokenizer = load_tokenizer(options.checkpoint)
    examples = None
    if options.data:
        data = DataConfig(data=options.data, chat=options.chat, max_length=options.max_length)
        data.check()
        examples = load_examples(options.data, tokenizer, data)
    model = load(options.checkpoint, dtype="float32")
    speeds = training.measure_training(
        model,
        tokenizer,
        options.batch_size,
        options.prompt_tokens,
        options.new_tokens,
        options.training_steps,
        options.repeats,
        dtype,
        options.seed,
        examples,
        options.max_length,
        progress=log,
    )
    setup = {
        "checkpoint": options.checkpoint,
        "method": model.config.method,
        "settings": model.config.settings(),
        "data": options.data,
        "max_length": options.max_length,
        "dtype": dtype,
        "batch_size": options.batch_size,
        "prompt_tokens": options.prompt_tokens,
        "answer_tokens": options.new_tokens,
        "steps": options.training_steps,
        "repeats": options.repeats,
    }
    machine = describe_machine(model.device)
    text = f"{training.heading(setup, machine)}\n\n{table(*training.as_rows(speeds))}"
    return Result(text, training.as_json(setup, machine, speeds))
