"""The registry of methods: the folders beside this file and the entry points of the group "polydecode.methods"."""

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from polydecode.errors import UserError, unknown_name

if TYPE_CHECKING:
    from polydecode.methods.base import ParallelDecoder, ParallelDecoderConfig

ENTRY_POINTS = "polydecode.methods"


def method_names() -> list[str]:
    """Names of all methods; imports none of them."""
    folders = {m.name for m in pkgutil.iter_modules(__path__) if m.ispkg}
    return sorted(folders | {e.name for e in entry_points(group=ENTRY_POINTS)})


def is_builtin(name: str) -> bool:
    """Whether a method is a folder of this package and no entry point of another."""
    return _package(name) == f"{__name__}.{name}"


def get_method(name: str) -> "tuple[type[ParallelDecoderConfig], type[ParallelDecoder]]":
    """(config class, model class) of a method; `UserError` with the nearest name when there is none."""
    if name not in method_names():
        raise unknown_name("method", name, method_names())
    package = _package(name)
    importlib.import_module(f"{package}.config")
    importlib.import_module(f"{package}.model")
    from polydecode.methods.base import ParallelDecoder

    for cls in _subclasses(ParallelDecoder):
        if cls.__module__ == f"{package}.model" and cls.config_class.method == name:
            return cls.config_class, cls
    raise UserError(f"method {name!r} has no model class in {package}.model")


def method_summary(name: str) -> str:
    """First line of the method's own description."""
    package = importlib.import_module(_package(name))
    return (package.__doc__ or "").strip().split("\n")[0]


def _package(name: str) -> str:
    external = {e.name: e.value for e in entry_points(group=ENTRY_POINTS)}
    return external.get(name, f"{__name__}.{name}")


def _subclasses(cls: "type[ParallelDecoder]") -> "list[type[ParallelDecoder]]":
    return [s for direct in cls.__subclasses__() for s in (direct, *_subclasses(direct))]
