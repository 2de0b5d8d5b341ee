"""`polydecode methods`: the registry as a table."""

from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace

from polydecode.cli.output import Result, table
from polydecode.cli.parser import Parser
from polydecode.methods import get_method, method_names, method_summary


def make_parser(argv: Sequence[str]) -> Parser:
    return Parser("methods", "List the decoding methods, their settings (for convert) and generation options.")


def run(values: Namespace) -> Result:
    found: list[dict[str, Any]] = []
    for name in method_names():
        config_class, model_class = get_method(name)
        found.append(
            {
                "name": name,
                "summary": method_summary(name),
                "settings": {setting: getattr(config_class, setting) for setting in config_class.SETTINGS},
                "generation_options": list(model_class.OPTIONS),
            }
        )
    blocks = [table(["method", "summary"], [[m["name"], m["summary"]] for m in found])]
    for m in found:
        if m["settings"]:
            rows = [[setting, str(default)] for setting, default in m["settings"].items()]
            blocks.append(table([f"setting of {m['name']}", "default"], rows))
    return Result("\n\n".join(blocks), {"methods": found})
