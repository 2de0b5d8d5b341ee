"""A benchmark's summaries as text and as JSON."""

from dataclasses import asdict
from typing import Any

from polydecode.benchmark.decoding import BASELINE, SANITY, Summary
from polydecode.benchmark.machine import Machine

_NAN_IS_NULL = ("ttft_s",)


def as_json(setup: dict[str, Any], machine: Machine, summaries: list[Summary]) -> dict[str, Any]:
    """Everything measured, the single runs included."""
    results = [asdict(s) for s in summaries]
    for result in results:
        for entry in (result, *result["runs"]):
            for name in _NAN_IS_NULL:
                entry[name] = None if entry[name] != entry[name] else entry[name]
    return {**setup, "machine": asdict(machine), "results": results}


def as_rows(summaries: list[Summary]) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of the table."""
    columns = [
        "decoding",
        "new tokens",
        "tokens/s",
        "min-max",
        "ms/token",
        "tokens/forward",
        "first token ms",
        "ratio",
        "min-max",
        "after first",
        "predicted",
        "with head",
    ]
    return columns, [_row(s) for s in summaries]


def heading(setup: dict[str, Any], machine: Machine) -> str:
    """What was measured on what, and what the columns mean."""
    return (
        f"{setup['checkpoint']}: {setup['dtype']}, batch {setup['batch_size']}, {setup['prompt_tokens']} prompt tokens, "
        f"median of {setup['repeats']} interleaved rounds\n"
        f"{machine.device_name} ({machine.device}, {machine.threads} threads), torch {machine.torch}, "
        f"transformers {machine.transformers}, polydecode {machine.polydecode}; "
        f"few-row products: {setup['few_row_products']}\n"
        "tokens/s counts the prompt's forward; ms/token and 'after first' do not; ratios are to autoregressive"
    )


def notes(summaries: list[Summary]) -> list[str]:
    """What the reader must not miss: where there is no gain, and a baseline that is slower than transformers."""
    told = [
        f"slower than one token per forward ({s.ratio:.2f}x): {label(s)} at {s.new_tokens} new tokens"
        for s in summaries
        if s.name not in (BASELINE, SANITY) and s.ratio < 1
    ]
    told += [
        f"the baseline is slower than transformers' own generate at {s.new_tokens} new tokens "
        f"({1 / s.ratio:.2f}x of its speed), so the ratios flatter"
        for s in summaries
        if s.name == SANITY and s.ratio_min > 1
    ]
    return told


def label(summary: Summary) -> str:
    """The way to decode with its options."""
    options = " ".join(f"{name}={value}" for name, value in summary.options.items())
    return f"{summary.name} {options}".strip()


def _row(s: Summary) -> list[Any]:
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None or value != value else f"{value:.{digits}f}"

    return [
        label(s),
        s.new_tokens,
        number(s.tokens_per_s, 1),
        f"{s.tokens_per_s_min:.1f}-{s.tokens_per_s_max:.1f}",
        number(s.ms_per_token, 2),
        number(s.tokens_per_forward, 2),
        number(1000 * s.ttft_s, 1),
        number(s.ratio, 2),
        f"{s.ratio_min:.2f}-{s.ratio_max:.2f}",
        number(s.decode_ratio, 2),
        number(s.predicted_ratio, 2),
        number(s.predicted_ratio_with_head, 2),
    ]
