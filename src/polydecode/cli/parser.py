"""Flags and YAML files from typed dataclasses, on jsonargparse.

What is unusual: flags are spelled with hyphens, booleans take no value, a list may be given by repeating its flag (numbers
also with commas), flags win over the file wherever `--config` stands, and every fault is one `UserError` line.
"""

import difflib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from polydecode.errors import UserError, unknown_name

T = TypeVar("T")
RECIPE_SECTIONS = ("convert", "train")
"""Commands whose settings a recipe holds, each in a section of its name."""


class Formatter(DefaultHelpFormatter):
    """One spelling per flag, and the default where there is one."""

    def _get_help_string(self, action: Any) -> str:
        told = (action.help or "").removesuffix(".")
        empty = action.default is None or action.default is False or action.default in ("", [], "==SUPPRESS==")
        return told if empty or not action.option_strings else f"{told} (default: %(default)s)"

    def _format_action_invocation(self, action: Any) -> str:
        if not action.option_strings:
            return action.metavar
        flags = ", ".join(o for o in action.option_strings if not o.endswith("+"))
        return flags if action.nargs == 0 else f"{flags} {action.metavar or _choices(action)}"


class Parser(ArgumentParser):
    """An argument parser for one command; `positionals` names the settings that are given without a flag."""

    def __init__(self, command: str, summary: str, positionals: Sequence[str] = (), **kwargs: Any):
        self.command = command.split()[0]
        self.positional_names = tuple(positionals)
        self.boolean_names: set[str] = set()
        names = " ".join(name.upper() for name in positionals)
        super().__init__(
            prog=f"polydecode {command}",
            usage=f"polydecode {command} {names} [settings]".replace("  ", " "),
            description=summary,
            allow_abbrev=False,
            formatter_class=Formatter,
            print_config=None,
            **kwargs,
        )
        self.add_argument("--config", action="config", metavar="FILE", help="YAML file of settings; flags win over it")
        self.add_argument("--json", type=bool, default=False, help="print the result as one JSON object")
        self.add_argument("--verbose", type=bool, default=False, help="show the libraries' warnings and progress bars")

    def add_options(self, options: type, skip: Sequence[str] = ()) -> None:
        """Flags for every field of the dataclass `options`; help comes from its docstring."""
        self.add_class_arguments(options, skip=set(skip))

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        parser = getattr(self, "parser", self)  # jsonargparse gives groups this method too
        name = args[0].lstrip("-")
        if name in parser.positional_names:
            for unused in ("default", "required"):
                kwargs.pop(unused, None)
            return super().add_argument(name, metavar=name.upper(), **kwargs)
        kwargs["metavar"] = _metavar(kwargs.get("type")) or kwargs.get("metavar")
        flags = [a.replace("_", "-") if a.startswith("--") else a for a in args]
        if kwargs.get("type") is bool and not kwargs.get(
            "default"
        ):  # what is on by default takes a value: --name false
            parser.boolean_names.add(name.replace("-", "_"))
            return super().add_argument(*flags, action="store_true", help=kwargs.get("help"))
        metavar = kwargs.pop("metavar")
        action = super().add_argument(*flags, **kwargs)
        action.metavar = metavar or action.metavar
        return action

    def format_help(self, formatter: Any = None) -> str:
        """The help text: what is given without a flag first, what every command has last."""
        groups: Any = self._action_groups
        groups.sort(key=lambda group: group is self._optionals)
        for group in groups:
            group._group_actions.sort(key=lambda action: bool(action.option_strings))
        return super().format_help(formatter)

    def read(self, argv: Sequence[str]) -> Namespace:
        """Values by name, from flags and the YAML file (`config_file`); raises `UserError` of one line."""
        path = peek(argv, "config")
        if path is not None:
            self._check_file(path)
        values = self.parse_args(self._prepared(argv))
        for name in self.boolean_names:
            if not isinstance(values[name], bool):
                raise UserError(f"{flag(name)} is {values[name]!r} in {path}; it must be true or false")
        values["config_file"] = path
        return values

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Every fault that jsonargparse finds, in our words."""
        raise UserError(self._reworded(message)) from None

    def names(self) -> dict[str, Any]:
        """The settings and their actions."""
        return {a.dest: a for a in self._actions if a.dest not in ("help", "config")}

    def _check_file(self, path: str) -> None:
        for name, value in read_settings(path, self.command).items():
            if name not in self.names():
                raise unknown_name(f"setting in {path}", str(name), self.names())
            hint = getattr(self.names()[name], "_typehint", None)
            if value is None and type(None) not in get_args(hint):
                raise UserError(f"{name} in {path} has no value; it must be {_type_words(hint)}, or leave the line out")
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise UserError(f"{name} in {path} is {str(value)!r}; it must be {_type_words(hint)}") from None

    def _prepared(self, argv: Sequence[str]) -> list[str]:
        """`argv` with the file first, so that flags win, and repeated list flags as one JSON list each."""
        kinds = {o: _item_type(getattr(a, "_typehint", None)) for a in self._actions for o in a.option_strings}
        lists = {o: kind for o, kind in kinds.items() if kind is not None}
        first: list[str] = []
        rest: list[str] = []
        found: dict[str, list[Any]] = {}
        for name, value, words in _words(argv, {*lists, "--config"}):
            if name == "--config" and value is not None:
                first = [f"--config={json.dumps(read_settings(value, self.command))}"]
            elif name == "--config":
                first += words
            elif name in lists and value is not None:
                found.setdefault(name, []).extend(_items(value, lists[name]))
            else:
                rest += words
        return first + [f"{name}={json.dumps(values)}" for name, values in found.items()] + rest

    def _reworded(self, message: str) -> str:
        unknown = re.match(r"unrecognized arguments: (.*)", message, re.IGNORECASE | re.DOTALL)
        if unknown:
            return self._unknown(unknown[1].split())
        missing = re.match(r"the following arguments are required: (.*)", message, re.DOTALL)
        missing = missing or re.match(r'(?s).*Key "?([\w.]+)"? is required', message)
        if missing:
            names = [n if n.startswith("-") or n in self.positional_names else flag(n) for n in missing[1].split(", ")]
            return f"missing {', '.join(n.upper() if n in self.positional_names else n for n in names)}; see {self.prog} --help"
        wrong = re.match(r'Parser key "(\w+)":', message)
        value = re.search(r"(?:Got|Given) value: (.*)\Z", message, re.DOTALL)
        if wrong and value and wrong[1] in self.names():
            expected = _type_words(getattr(self.names()[wrong[1]], "_typehint", None))
            return f"{flag(wrong[1])} is {value[1]!r}; it must be {expected}"
        return " ".join(message.removeprefix('Parser key "config":').split())

    def _unknown(self, words: list[str]) -> str:
        flags = [w.split("=")[0] for w in words if w.startswith("-")]
        if not flags:
            return f"unexpected argument {words[0]!r}; see {self.prog} --help"
        known = [o for a in self._actions for o in a.option_strings if o.startswith("--") and not o.endswith("+")]
        near = difflib.get_close_matches(flags[0], known, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else f"; see {self.prog} --help"
        return f"unknown flag {flags[0]!r} of {self.prog!r}{hint}"


def options_of(cls: Callable[..., T], values: Namespace, skip: Sequence[str] = ()) -> T:
    """The dataclass `cls` filled from parsed values."""
    names = [n for n in cls.__dataclass_fields__ if n not in skip]  # type: ignore[attr-defined]
    return cls(**{n: values[n] for n in names})


def flag(name: str) -> str:
    """How a setting is spelled on the command line."""
    return "--" + name.replace("_", "-")


def peek(argv: Sequence[str], name: str, command: str = "") -> str | None:
    """The value of a flag, or of the setting in the YAML file, before the parser exists; None when not given. `command`: whose
    section of a recipe to read."""
    given = [value for found, value, _ in _words(argv, {flag(name)}) if found and value is not None]
    if given or name == "config":
        return given[-1] if given else None
    path = peek(argv, "config")
    value = read_settings(path, command).get(name) if path is not None else None
    return None if value is None else str(value)


def read_settings(path: str, command: str) -> dict[str, Any]:
    """The settings for `command` in a YAML file: all of it, or of a recipe (a file with a section per command) its section.

    Raises `UserError` for a recipe that has none for `command`.
    """
    content = read_yaml(path)
    sections = [name for name in RECIPE_SECTIONS if isinstance(content.get(name), dict)]
    if not sections:
        return content
    if command and command not in sections:
        raise UserError(f"recipe {path!r} has no section {command!r}; it has {', '.join(sections)}")
    return content.get(command, {})


def read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML file; `UserError` for what is none."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueNames)
    except OSError as error:
        raise UserError(f"config file {path!r} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        raise UserError(f"config file {path!r} is no valid YAML: {error}") from None
    if not isinstance(content, dict | None):
        raise UserError(f"config file {path!r} must hold `name: value` lines")
    return content or {}


class _UniqueNames(yaml.SafeLoader):
    """YAML in which a name given twice is a fault, not the last one's."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _words(argv: Sequence[str], flags: set[str]) -> list[tuple[str | None, str | None, list[str]]]:
    """`argv` in pieces (flag, its value, the words), with flag None for what is not in `flags`."""
    pieces: list[tuple[str | None, str | None, list[str]]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in flags:
            pieces.append((None, None, [word]))
        elif equals:
            pieces.append((name, value, [word]))
        elif words:
            pieces.append((name, words[0], [word, words.pop(0)]))
        else:
            pieces.append((name, None, [word]))
    return pieces


def _item_type(hint: Any) -> Any:
    """The item type of a list (or optional list), None for anything else."""
    for kind in (hint, *get_args(hint)):
        if kind is list or get_origin(kind) is list:
            return (get_args(kind) or (int,))[0]
    return None


def _items(value: str, kind: Any) -> list[Any]:
    """The items in one value of a list flag: numbers split at commas, strings as they are."""
    if kind is str:
        return [value]
    inner = value.strip().removeprefix("[").removesuffix("]")
    return [yaml.safe_load(part) if part.strip() else part for part in inner.split(",")]


def _metavar(hint: Any) -> str | None:
    """What stands for the value in --help; None leaves it to jsonargparse (choices, actions)."""
    item = _item_type(hint)
    if item is not None:
        return "TEXT" if item is str else "N,N,..."
    kinds = {k for k in (get_args(hint) or (hint,)) if k is not type(None)}
    if kinds == {int, float}:
        return "X"
    return {int: "N", float: "X", str: "TEXT"}.get(next(iter(kinds))) if len(kinds) == 1 else None


def _choices(action: Any) -> str:
    return "{" + ",".join(str(c) for c in get_args(getattr(action, "_typehint", None)) or [action.dest.upper()]) + "}"


def _type_words(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    if get_origin(hint) is list:
        return f"a list ({_type_words(get_args(hint)[0])} each)"
    if get_origin(hint) is Union or type(hint).__name__ == "UnionType":
        return " or ".join(_type_words(a) for a in get_args(hint) if a is not type(None))
    choices = [str(a) for a in get_args(hint)]
    return f"one of {', '.join(choices)}" if choices else str(hint)
