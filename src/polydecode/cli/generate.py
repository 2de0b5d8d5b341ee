"""`polydecode generate CHECKPOINT`: text from one prompt, streaming to the terminal."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from polydecode.cli.device import DecodingOptions, open_model
from polydecode.cli.method_flags import add_generation_options, chosen_options
from polydecode.cli.output import Result, log
from polydecode.cli.parser import Parser, flag, options_of
from polydecode.errors import UserError

if TYPE_CHECKING:
    from polydecode.generate import GenerateOutput


@dataclass
class GenerateOptions(DecodingOptions):
    """What to generate.

    Attributes:
        checkpoint: a polydecode checkpoint, or any source.
        prompt: the prompt; without it and --prompt-file, it is read from stdin.
        prompt_file: file that holds the prompt.
        chat: put the prompt into the tokenizer's chat template, as the user's turn.
        autoregressive: decode the same weights one token per forward.
        max_new_tokens: new tokens at most.
        temperature: 0 takes the most likely token each time; above 0 tokens are drawn.
        top_k: draw from this many most likely tokens; 0 means all.
        top_p: draw from the most likely tokens that reach this probability together.
        seed: seed of the draws.
        stop: stop after this text; repeat the flag for several.
    """

    checkpoint: str
    prompt: list[str] = field(default_factory=list)
    prompt_file: str = ""
    chat: bool = False
    autoregressive: bool = False
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: list[str] = field(default_factory=list)


def make_parser(argv: Sequence[str]) -> Parser:
    parser = Parser("generate", "Generate text from a prompt, streaming to the terminal.", positionals=("checkpoint",))
    parser.add_options(GenerateOptions)
    add_generation_options(parser)
    return parser


def run(values: Namespace) -> Result:
    options = options_of(GenerateOptions, values)
    method_options = chosen_options(values)
    _check(options, method_options)
    prompt = read_prompt(options)

    from transformers import TextStreamer

    from polydecode.auto import load_tokenizer
    from polydecode.benchmark.decoding import autoregressive_of
    from polydecode.generate import GenerateOutput, generate

    tokenizer = load_tokenizer(options.checkpoint)
    input_ids = encode(tokenizer, prompt, options.chat)
    model = open_model(options.checkpoint, options)
    if options.autoregressive:
        model = autoregressive_of(model)
    model.check_options(method_options)
    output = generate(
        model,
        input_ids,
        max_new_tokens=options.max_new_tokens,
        **_sampling(options),
        seed=options.seed,
        stop_strings=_stop_strings(options.stop),
        tokenizer=tokenizer,
        streamer=None if values.json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        return_dict_in_generate=True,
        **method_options,
    )
    assert isinstance(output, GenerateOutput)
    stats = _stats(output)
    log(
        f"{stats['new_tokens']} new tokens, {stats['tokens_per_s']:.1f} tokens/s, "
        f"{stats['tokens_per_forward']:.2f} tokens per forward ({model.config.method})"
    )
    assert output.sequences is not None
    text = tokenizer.decode(output.sequences[0, input_ids.shape[1] :], skip_special_tokens=True)
    return Result(data={"text": text, "method": model.config.method, **stats})


def _stats(output: "GenerateOutput") -> dict[str, Any]:
    new_tokens = output.num_new_tokens[0]
    return {
        "finish_reason": output.finish_reason[0],
        "new_tokens": new_tokens,
        "tokens_per_s": new_tokens / max(output.elapsed_s, 1e-9),
        "tokens_per_forward": output.tokens_per_forward,
        "ttft_s": output.ttft_s,
        "elapsed_s": output.elapsed_s,
    }


def read_prompt(options: GenerateOptions) -> str:
    """The prompt from the flag, the file or stdin; `UserError` unless there is exactly one and it is not empty."""
    if len(options.prompt) > 1:
        raise UserError(f"{len(options.prompt)} prompts given; generate takes one prompt per call")
    if options.prompt and options.prompt_file:
        raise UserError("give --prompt or --prompt-file, not both")
    if options.prompt:
        prompt = options.prompt[0]
    else:
        if not options.prompt_file and sys.stdin.isatty():
            log("reading the prompt from the terminal; end it with Ctrl-D")
        prompt = _read(options.prompt_file)
    if not prompt.strip():
        raise UserError("the prompt is empty; give some text with --prompt, --prompt-file or on stdin")
    return prompt


def encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    """Token ids (1, P) of the prompt, in the chat template if `chat`."""
    if not chat:
        return tokenizer(prompt, return_tensors="pt").input_ids
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; leave --chat away")
    import torch

    from polydecode.data import chat_ids

    return torch.tensor([chat_ids([{"role": "user", "content": prompt}], tokenizer)])


def _read(file: str) -> str:
    name = repr(file) if file else "stdin"
    try:
        return Path(file).read_text(encoding="utf-8") if file else sys.stdin.read()
    except OSError as error:
        raise UserError(f"the prompt cannot be read from {name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"the prompt in {name} is not UTF-8 text") from None


def _check(options: GenerateOptions, method_options: dict[str, Any]) -> None:
    if options.autoregressive and method_options:
        raise UserError(
            f"--autoregressive decodes one token per forward; leave {flag(next(iter(method_options)))} away"
        )
    if options.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {options.max_new_tokens}; it must be 1 or more")
    if options.temperature == 0 and (options.top_k or options.top_p != 1.0):
        log("note: --top-k and --top-p have no effect at --temperature 0")


def _sampling(options: GenerateOptions) -> dict[str, Any]:
    """Settings of the draw as transformers names them; greedy at temperature 0."""
    if options.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {
        "do_sample": True,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
    }


def _stop_strings(stop: list[str]) -> list[str] | None:
    if "" in stop:
        raise UserError("a stop text is empty; leave it out")
    return stop or None
