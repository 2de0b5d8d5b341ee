"""Recipes: every file parses for every command it has a section for, and dry-runs to the memory and hours it promises."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from polydecode.cli import main
from polydecode.cli.convert import make_parser
from polydecode.errors import UserError
from polydecode.methods import get_method

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
PUBLISHED = {"smollm2-135m": 134_515_008, "qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096}
"""Parameters of the models, from their cards and files."""


def ids(path: Path) -> str:
    return path.stem


def dry_run(capsys, path, *words) -> dict:
    capsys.readouterr()
    code = main(["train", "--config", str(path), "--dry-run", "--json", *map(str, words)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def test_there_is_a_recipe_for_every_size_and_method():
    """Bug: a recipe that was promised and is not there."""
    methods = {
        (p.stem.split("-dmtd")[0].split("-block")[0], yaml.safe_load(p.read_text())["convert"]["method"])
        for p in RECIPES
    }
    assert methods == {(size, method) for size in PUBLISHED for method in ("dmtd", "block_diffusion")}


@pytest.mark.parametrize("path", RECIPES, ids=ids)
def test_recipe_dry_runs_to_what_it_promises(path, capsys, monkeypatch, tmp_path):
    """Bug: a recipe with a misspelt setting, another model, or numbers that the estimator no longer gives."""
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load(path.read_text())
    world = 8 if "4b" in path.stem else 1
    found = dry_run(capsys, path, "--world-size", world)
    size = next(n for name, n in PUBLISHED.items() if path.stem.startswith(name))
    assert size <= found["parameters"] < 1.05 * size  # adapters and an added row
    expected = recipe["expected"]
    memory = found["memory"]["per_process"]["sharded"] / 1e9
    assert memory == pytest.approx(expected["memory_gb"], rel=0.05)
    assert found["hours"] == pytest.approx(expected["hours"], rel=0.05)
    assert found["tokens"] == recipe["train"]["max_tokens"]
    assert found["steps"] == recipe["train"]["max_steps"]
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"


@pytest.mark.parametrize("path", RECIPES, ids=ids)
def test_recipe_converts_with_its_own_section(path):
    """Bug: `convert --config` that reads the train section, or settings the method does not have."""
    values = make_parser(["--config", str(path)]).read(["--config", str(path)])
    section = yaml.safe_load(path.read_text())["convert"]
    assert all(values[name] == value for name, value in section.items())
    get_method(section["method"])[0].check_names(
        {name: v for name, v in section.items() if name not in ("source", "out", "method")}
    )
    assert section["out"] == yaml.safe_load(path.read_text())["train"]["checkpoint"]


def test_the_papers_hyperparameters():
    """Bug: a "paper" recipe that silently is another one (spec/dmtd.md 2.2, spec/efficient_dlm.md 2)."""
    for cycle in (3, 4):
        recipe = yaml.safe_load((FOLDER / f"qwen3-4b-dmtd-c{cycle}.yaml").read_text())
        convert, train = recipe["convert"], recipe["train"]
        assert (convert["num_encoding_layers"], convert["num_decoding_layers"]) == (0, 8)
        assert (convert["cycle_length"], convert["merge"]) == (cycle, "add")
        assert (train["learning_rate"], train["schedule"], train["warmup_ratio"]) == (1e-4, "cosine", 0.1)
        assert (train["max_length"], train["batch_size"], train["train_embeddings"]) == (4096, 512, False)
    recipe = yaml.safe_load((FOLDER / "qwen3-4b-block-diffusion.yaml").read_text())
    assert (recipe["convert"]["block_size"], recipe["convert"]["half_life_ratio"]) == (64, 0.1)
    assert (recipe["train"]["learning_rate"], recipe["train"]["min_learning_rate"]) == (1e-5, 3e-6)
    assert recipe["train"]["schedule"] == "cosine"


@pytest.fixture
def recipe(tmp_path):
    """A copy of a small recipe that may be changed."""
    shutil.copytree(FOLDER / "configs", tmp_path / "configs")
    path = tmp_path / "r.yaml"
    content = yaml.safe_load((FOLDER / "smollm2-135m-dmtd.yaml").read_text())

    def write(section: str = "train", **changes) -> Path:
        path.write_text(yaml.safe_dump({**content, section: {**content[section], **changes}}))
        return path

    return write


def test_flags_win_over_a_recipe(recipe, capsys):
    """Bug: a section that overrides the command line."""
    assert dry_run(capsys, recipe(), "--max-steps", 3)["steps"] == 3


@pytest.mark.parametrize(
    ("section", "changes", "needle"),
    [
        ("train", {"learning_rat": 1.0}, "did you mean 'learning_rate'?"),
        ("train", {"data": ["no/such/file.jsonl"]}, "no data file"),
        ("train", {"schedule": "cosin"}, "schedule"),
        ("train", {"lora_rank": 4, "lora_targets": "nothing"}, "lora_targets names 'nothing'"),
        ("convert", {"num_decoding_layers": 31}, "more than the model's 30 layers"),
        ("convert", {"cycle_lenght": 3}, "did you mean 'cycle_length'?"),
        ("convert", {"method": "dmdt"}, "did you mean 'dmtd'?"),
    ],
)
def test_a_wrong_recipe_is_one_line(recipe, section, changes, needle, capsys):
    """Bug: a fault of the recipe found after the download, or by a traceback."""
    assert main(["train", "--config", str(recipe(section, **changes)), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert needle in error
    assert error.count("\n") == 1


def test_a_recipe_without_the_section_is_refused(tmp_path, capsys):
    """Bug: a command that runs with its defaults because the recipe is for another one."""
    (tmp_path / "r.yaml").write_text("train: {out: x}\n")
    assert main(["convert", "s", "o", "--config", str(tmp_path / "r.yaml")]) == 2
    assert "no section 'convert'; it has train" in capsys.readouterr().err
    with pytest.raises(UserError, match="no section"):
        make_parser(["--config", str(tmp_path / "r.yaml")])
