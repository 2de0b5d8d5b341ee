"""The house stays as it was drawn: floors, file sizes, and who may know what. Read from the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "polydecode"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 350

FLOORS = {
    0: ["", "errors", "paths"],
    1: ["config", "ops"],
    2: ["methods"],
    3: ["auto"],
    4: ["convert", "data", "generate"],
    4.5: ["train"],  # the floor of convert and data in the design; it reads through one and writes through the other
    5: ["evaluate", "benchmark", "serve", "embed", "tasks", "inspection", "doctor", "demo", "distill"],
    6: ["cli"],
    7: ["__main__"],
}
"""Top-level names of the package by floor; "" is polydecode/__init__.py. A file imports from its own name or lower floors."""

FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
LAZY_EXCEPTIONS = {("methods/base.py", "generate", "polydecode.generate")}
"""(file, function, module): `model.generate(...)` is what users of transformers expect to find on a model."""

METHOD_NAMES = {"dmtd", "block_diffusion"}
MAY_NAME_A_METHOD = {"convert.py", "config.py", "cli/convert.py"}
"""Files that hold a default; the demo, which shows one method, may as well."""

CACHE_WORDS = {
    "past_key_values",
    "DynamicCache",
    "StaticCache",
    "DynamicLayer",
    "CacheLayerMixin",
    "EncoderDecoderCache",
}


def parts_of(path: Path) -> list[str]:
    """Dotted name below polydecode, as a list; a package is its folder."""
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(enclosing function or "", module of this package) for each import outside `if TYPE_CHECKING`."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                yield from walk(child, function)
            return
        if isinstance(node, ast.Import):
            yield from ((function, alias.name) for alias in node.names if alias.name.split(".")[0] == "polydecode")
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = parts_of(path) if path.name == "__init__.py" else parts_of(path)[:-1]
                package = package[: len(package) - node.level + 1]
                module = ".".join(["polydecode", *package, *filter(None, [module])])
            if module.split(".")[0] == "polydecode":
                for alias in node.names:
                    folder = SOURCE.joinpath(*module.split(".")[1:])
                    is_module = (folder / alias.name).is_dir() or (folder / f"{alias.name}.py").is_file()
                    yield function, f"{module}.{alias.name}" if is_module else module
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    yield from walk(tree(path), "")


def test_every_file_has_a_floor():
    """Bug: a new room that no rule covers."""
    for path in FILES:
        top = (parts_of(path) or [""])[0]
        assert top in FLOOR_OF, f"{name(path)}: give it a floor in this test and in the design"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_imports_only_from_lower_floors(path):
    """Bug: ops knowing a method, a method knowing the trainer, a cycle of imports."""
    mine = parts_of(path) or [""]
    for function, module in imports(path):
        if (name(path), function, module) in LAZY_EXCEPTIONS:
            continue
        theirs = module.split(".")[1:] or [""]
        if theirs[0] != mine[0]:
            assert FLOOR_OF.get(theirs[0], 99) < FLOOR_OF[mine[0]], f"{name(path)} imports {module}"
        elif mine[0] == "methods" and len(mine) > 2:
            assert theirs[1:2] in ([], ["base"], ["batch"], mine[1:2]), f"{name(path)} imports another method: {module}"
        elif mine[0] == "methods" and mine[1:2] == ["base"]:
            assert theirs in (["methods"], ["methods", "batch"]), f"the contract imports a method: {module}"


def test_the_import_reader_reads():
    """Bug: a reader that finds nothing makes the test above pass for ever."""
    found = dict.fromkeys(module for path in FILES for _, module in imports(path))
    assert {"polydecode.errors", "polydecode.ops.layers", "polydecode.methods.base", "polydecode.generate"} <= set(
        found
    )
    base = next(path for path in FILES if name(path) == "methods/base.py")
    assert ("generate", "polydecode.generate") in imports(base)


def test_files_stay_small():
    """Bug: the 900-line file; and the drawer for everything."""
    long = {name(path): count for path in FILES if (count := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long
    assert not [name(path) for path in FILES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def words(path: Path) -> Iterator[str]:
    """Every identifier, attribute, keyword and imported name of a file."""
    for node in ast.walk(tree(path)):
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


def test_one_file_knows_the_cache_protocol():
    """Bug: transformers renames its cache (as it did) and five files break."""
    for path in FILES:
        if name(path) != "ops/cache.py":
            known = CACHE_WORDS & set(words(path))
            assert not known, f"{name(path)} names {known}"
            assert "transformers.cache_utils" not in path.read_text(), name(path)


def test_one_file_knows_the_layers_signature():
    """Bug: a second place that calls the layers of transformers and drifts from the first."""
    for path in FILES:
        if name(path) != "ops/layers.py":
            called = {k.arg for n in ast.walk(tree(path)) if isinstance(n, ast.Call) for k in n.keywords}
            assert "position_embeddings" not in called, name(path)


def test_nothing_outside_a_method_knows_its_name():
    """Bug: `if method == "dmtd"` in the trainer; a third method then needs changes everywhere."""
    for path in FILES:
        parts = parts_of(path)
        if parts[:1] == ["demo"] or name(path) in MAY_NAME_A_METHOD:
            continue
        said = {
            n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)
        } & METHOD_NAMES
        assert said <= set(parts[1:2] if parts[:1] == ["methods"] else []), f"{name(path)} names {said}"


def test_importing_the_package_is_cheap():
    """Bug: `import polydecode` or the command line loading torch and transformers, four seconds before --help."""
    import subprocess
    import sys

    code = "import polydecode, polydecode.errors, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
