"""Flags that come from the methods themselves, so that a new method folder needs no change here."""

import re
from typing import Any, Union

from polydecode.cli.parser import Parser
from polydecode.methods import get_method, method_names

_GAP = re.compile(r"\s+")


def add_settings(parser: Parser, method: str) -> list[str]:
    """Flags for the settings of `method`, with types and defaults from its config class; their names."""
    config_class, _ = get_method(method)
    if not config_class.SETTINGS:
        return []
    group = parser.add_argument_group(f"settings of {method}")
    for name in config_class.SETTINGS:
        if name not in parser.names():
            group.add_argument(
                f"--{name}",
                type=setting_type(config_class, name),
                default=getattr(config_class, name),
                help=setting_help(config_class, name),
            )
    return list(config_class.SETTINGS)


def add_generation_options(parser: Parser, as_list: bool = False) -> list[str]:
    """Flags for the generation options of all methods, not set by default; their names. `as_list`: several values each."""
    added: list[str] = []
    group = parser.add_argument_group("generation options of the methods")
    for method in method_names():
        config_class, model_class = get_method(method)
        for name in model_class.OPTIONS:
            if name in added:
                continue
            kind = setting_type(config_class, name)
            what = "several: repeat, or use commas" if as_list else "default: the checkpoint's own"
            group.add_argument(
                f"--{name}",
                type=Union[list[kind], None] if as_list else Union[kind, None],  # type: ignore[valid-type]  # noqa: UP007
                default=None,
                help=f"{method}: {setting_help(config_class, name)} ({what})",
            )
            added.append(name)
    return added


def setting_type(config_class: type, name: str) -> Any:
    """The type of a setting as a type hint; text for an option that is no setting."""
    allowed = config_class.SETTINGS.get(name, str)  # type: ignore[attr-defined]
    return Union[allowed] if isinstance(allowed, tuple) else allowed  # noqa: UP007


def setting_help(config_class: type, name: str) -> str:
    """What the docstring of the config says after "`name`:", else the sentence that mentions it."""
    text = _GAP.sub(" ", config_class.__doc__ or "")
    told = re.search(rf"`{name}`: (.*?)(?= `\w+`: |$)", text)
    if told:
        return _tidy(told[1])
    sentences = [s for s in re.split(r"(?<=\.) ", text) if f"`{name}`" in s]
    return _tidy(sentences[0]) if sentences else name.replace("_", " ")


def _tidy(text: str) -> str:
    return text.strip().rstrip(".").replace("%", "%%")


def chosen_options(values: Any) -> dict[str, Any]:
    """The generation options that were given."""
    names = {name for method in method_names() for name in get_method(method)[1].OPTIONS}
    given = {name: values[name] for name in sorted(names) if values.get(name) is not None}
    return {name: _split(value) if isinstance(value, list) else value for name, value in given.items()}


def _split(values: list[Any]) -> list[Any]:
    """Words with commas as several words; other items as they are."""
    return [part for value in values for part in (value.split(",") if isinstance(value, str) else [value])]
