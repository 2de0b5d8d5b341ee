"""polydecode: several tokens per forward pass from a pretrained language model.

    import polydecode
    model = polydecode.convert("smollm2-135m", method="dmtd", cycle_length=3)
    model = polydecode.load("path/to/checkpoint")

Names are imported when first used, so `import polydecode` is cheap.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "convert", "generate", "load", "load_tokenizer"]

if TYPE_CHECKING:
    from polydecode.auto import load, load_tokenizer
    from polydecode.convert import convert
    from polydecode.generate import generate

_WHERE = {"load": "auto", "load_tokenizer": "auto", "convert": "convert", "generate": "generate"}


class _Package(ModuleType):
    """Keeps `polydecode.convert` and `polydecode.generate` the functions once the modules of those names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if _WHERE.get(name) == name and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str):
    if name in _WHERE:
        value = getattr(import_module(f"polydecode.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'polydecode' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
