"""`polydecode train CHECKPOINT OUT --data FILE [...]`: its flags are the fields of `TrainConfig`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from polydecode.cli.output import Result
from polydecode.cli.parser import Parser, options_of, read_yaml
from polydecode.config import TrainConfig
from polydecode.errors import UserError

if TYPE_CHECKING:
    from polydecode.train.dry_run import Planned


@dataclass
class DryRunOptions:
    """Look before you leap.

    Attributes:
        dry_run: check settings and data, print parameters, memory, steps and tokens, and write nothing; reads no weights.
        world_size: processes the dry run is for.
        tokens_per_s: training speed of all processes together, for the dry run's hours; 0 when unknown.
    """

    dry_run: bool = False
    world_size: int = 1
    tokens_per_s: float = 0.0


def make_parser(argv: Sequence[str]) -> Parser:
    summary = "Train a converted checkpoint on your data. Ctrl-C ends the run early and still writes the checkpoint."
    parser = Parser("train", summary, positionals=("checkpoint", "out"))
    parser.add_options(TrainConfig)
    parser.add_options(DryRunOptions)
    return parser


def run(values: Namespace) -> Result:
    config = options_of(TrainConfig, values)
    config.check()
    if values["dry_run"]:
        return _dry_run(config, values)
    from polydecode.train import train

    metrics = train(config)
    lines = [f"wrote {config.out}", *(f"  {name}: {value}" for name, value in metrics.items())]
    return Result("\n".join(lines), {"checkpoint": config.out, **metrics})


def _dry_run(config: TrainConfig, values: Namespace) -> Result:
    from polydecode.train.dry_run import dry_run

    file = values["config_file"]
    recipe = read_yaml(file) if file else {}
    expected: Any = recipe.get("expected") or {}
    speed = values["tokens_per_s"] or float(expected.get("tokens_per_s", 0))
    found = dry_run(config, planned_checkpoint(recipe, file), values["world_size"], speed)
    return Result("\n".join(found.lines()), found.as_json())


def planned_checkpoint(recipe: dict[str, Any], path: str | None) -> "Planned | None":
    """What the `convert` section of a recipe would make; None for a file without one."""
    from polydecode.train.dry_run import Planned

    section = recipe.get("convert")
    if not isinstance(section, dict):
        return None
    for name in ("source", "method"):
        if not section.get(name):
            raise UserError(f"the convert section of {path!r} names no {name}")
    settings = {name: value for name, value in section.items() if name not in ("source", "out", "method", "overwrite")}
    file = recipe.get("base_config")
    base_config = Path(str(path)).parent / file if file else None
    return Planned(section["source"], section["method"], settings, base_config)
