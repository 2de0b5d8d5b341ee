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
    check_measure(options.prompt_tokens, lengths, options.batch_size, options.repeats)
    if options.threads < 0:
        raise UserError(f"threads is {options.threads}; it must be 1 or more, or 0 for torch's choice")
    if options.threads:
        torch.set_num_threads(options.threads)
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
