"""Check a source, its data and a planned run before any time is spent, and say what to mend.

Every check gives findings ("ok", "warn", "fail"). What depends on the method comes from the method (`advice`,
`training_pass`); nothing here knows one by name. Small models are loaded and run for a step or two; of larger ones (and with
`measure` off) only the config and the data are looked at.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from polydecode.auto import check_architecture, load_base, load_tokenizer, read_config, resolve_source
from polydecode.auto.loading import check_structure
from polydecode.auto.meta import meta_decoder
from polydecode.config import TrainConfig
from polydecode.data import Example, load_examples
from polydecode.doctor.data import data_findings, length_findings
from polydecode.doctor.measure import measured_findings
from polydecode.doctor.source import model_findings, tokenizer_findings
from polydecode.errors import UserError
from polydecode.methods import get_method
from polydecode.methods.base import ParallelDecoder, ParallelDecoderConfig
from polydecode.methods.batch import Finding
from polydecode.train.memory import available_bytes, estimate_memory, gigabytes, lengths_of
from polydecode.train.memory import warning as memory_warning
from polydecode.train.parameters import prepare_parameters

__all__ = ["Examination", "examine"]

MEASURED_PARAMETERS = 700_000_000
"""Models up to this size are loaded and run."""


@dataclass
class Examination:
    """All findings, in order, and the numbers behind them."""

    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether anything would make the run fail or its result useless."""
        return any(f.level == "fail" for f in self.findings)


def examine(
    config: TrainConfig, method: str | None = None, settings: dict[str, Any] | None = None, measure: bool = True
) -> Examination:
    """Findings for training `config.checkpoint` with `method` (None: a checkpoint's own, or one token per forward).

    `config.data` may be empty, then only the model is examined. Raises `UserError` for settings that no run could have and
    for a source that cannot be opened; what can be opened but not trained is a finding.
    """
    replace(config, data=config.data or ["-"], out=config.out or "-").check()
    found: Any = read_config(resolve_source(config.checkpoint))
    own = found if isinstance(found, ParallelDecoderConfig) else None
    base_config: Any = found if own is None else own.base_config
    report = Examination()
    try:
        check_structure(base_config, config.checkpoint)
    except UserError as error:
        report.findings.append(Finding("architecture", "fail", str(error), "choose a model of a supported family"))
        return report
    tokenizer, told = _tokenizer(config.checkpoint)
    report.findings += told
    rows = base_config.vocab_size
    if own is not None and method in (None, own.method):
        method, settings = own.method, {**own.settings(), **(settings or {})}
    method = method or "autoregressive"
    model = meta_decoder(base_config, method, settings or {}, tokenizer)
    size = sum(p.numel() for p in model.parameters())
    small = size <= MEASURED_PARAMETERS
    if measure and small:
        base = load_base(config.checkpoint, "float32")
        try:
            difference = check_architecture(base)
        except UserError as fault:
            report.findings.append(Finding("architecture", "fail", str(fault), "choose a model of a supported family"))
            return report
        says = (
            f"{base_config.model_type}: layers run one by one give the model's own logits (difference {difference:.0e})"
        )
        report.findings.append(Finding("architecture", "ok", says))
        model = get_method(method)[1].from_base(base, tokenizer, **(settings or {}))
    else:
        why = (
            "not measured (--no-measure)"
            if not measure
            else f"{size / 1e9:.1f} billion parameters, too many to run here"
        )
        report.findings.append(
            Finding("architecture", "ok", f"{base_config.model_type}: has the parts; {why}; convert will measure it")
        )
    report.findings += model_findings(model, rows)
    if tokenizer is not None:
        report.findings += tokenizer_findings(tokenizer, config)
    examples = _examples(config, tokenizer, report)
    answers = [answer for _, answer in lengths_of(examples)]
    report.findings += length_findings(model, examples, config) + model.advice(answers, tokenizer)
    _memory(model, config, examples, report)
    if measure and small and examples:
        findings, numbers = measured_findings(model, config, examples)
        report.findings += findings
        report.numbers |= numbers
    elif examples:
        report.findings.append(Finding("time and first loss", "ok", "not measured"))
    return report


def _tokenizer(source: str) -> tuple[Any, list[Finding]]:
    try:
        return load_tokenizer(source), []
    except UserError as error:
        return None, [Finding("tokenizer", "fail", str(error), "save the source's tokenizer into its folder")]


def _examples(config: TrainConfig, tokenizer: Any, report: Examination) -> list[Example]:
    """The examples, none where there are no data or they are at fault, which is then a finding."""
    if not config.data or tokenizer is None:
        return []
    try:
        examples = list(load_examples(config.data, tokenizer, replace(config, no_cache=True)))
    except UserError as error:
        report.findings.append(Finding("data", "fail", str(error), "mend or remove what is named"))
        return []
    report.findings += data_findings(examples)
    return examples


def _memory(model: ParallelDecoder, config: TrainConfig, examples: list[Example], report: Examination) -> None:
    prepare_parameters(model, config)
    row = min(config.max_length, model.config.max_position_embeddings)
    estimate = estimate_memory(model, config, [(0, row)] if config.packing else lengths_of(examples) or [(0, row)])
    available = available_bytes()
    told = memory_warning(estimate, available)
    says = f"{estimate.line()}; {gigabytes(available)} available"
    mend = "" if told is None else told.rpartition(": ")[2]
    report.findings.append(Finding("memory", "ok" if told is None else "fail", says, mend))
    report.numbers |= {"memory_bytes": round(estimate.total), "available_bytes": round(available)}
