"""`polydecode distill SOURCE --prompts FILE --output FILE.jsonl`: the source's own answers as training data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jsonargparse import Namespace

from polydecode.cli.device import DecodingOptions, open_model
from polydecode.cli.output import Result, log
from polydecode.cli.parser import Parser, options_of
from polydecode.distill.settings import DistillConfig


@dataclass
class DistillOptions(DistillConfig, DecodingOptions):
    """What is asked, how it is answered, and where."""


def make_parser(argv: Sequence[str]) -> Parser:
    summary = "Let a source model answer prompts in large batches, as training data in its own words."
    parser = Parser("distill", summary, positionals=("source",))
    parser.add_options(DistillOptions)
    return parser


def run(values: Namespace) -> Result:
    options = options_of(DistillOptions, values)
    options.check()

    from polydecode.auto import load_tokenizer, read_config, resolve_source
    from polydecode.benchmark.decoding import autoregressive_of
    from polydecode.distill.output import Output, settings_of
    from polydecode.distill.prompts import read_prompts
    from polydecode.distill.run import distill

    tokenizer = load_tokenizer(options.source)
    context = read_config(resolve_source(options.source)).max_position_embeddings
    prompts = read_prompts(options, tokenizer, context)
    output = Output(options, settings_of(options, _machine(options)))
    output.check(options)
    if options.resume:
        log(f"{output.counts['answers']:,} answers are there" if output.resumed else "nothing to resume: a new run")
    if output.done:
        return _result(options, {**output.counts, "tokens_per_s": 0.0})
    model = open_model(options.source, options)
    if options.autoregressive:
        model = autoregressive_of(model)
    try:
        counts = distill(model, tokenizer, prompts, options, output)
    except KeyboardInterrupt:
        log(f"{output.counts['answers']:,} answers are kept; --resume goes on")
        raise
    return _result(options, counts)


def _machine(options: DistillOptions) -> dict[str, str]:
    """What the answers' rounding depends on: dtype and kind of device."""
    from polydecode.benchmark.machine import default_device, default_dtype

    device = default_device() if options.device == "auto" else options.device
    return {
        "dtype": default_dtype(device) if options.dtype == "auto" else options.dtype,
        "device": device.split(":")[0],
    }


def _result(options: DistillOptions, counts: dict[str, Any]) -> Result:
    left_out = [f"{counts['empty']:,} empty left out"] if counts["empty"] else []
    if counts["unfinished"]:
        fate = "kept" if options.keep_unfinished else "left out"
        left_out.append(f"{counts['unfinished']:,} cut at {options.max_new_tokens} tokens {fate}")
    line = f"wrote {options.output}: {counts['written']:,} of {counts['answers']:,} answers"
    text = ", ".join([line, *left_out]) + f"; {counts['new_tokens']:,} tokens, {counts['tokens_per_s']} tokens/s"
    return Result(text, {"output": options.output, **counts})
