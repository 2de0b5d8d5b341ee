"""Three short tasks with checkable answers, made from a seed: what a 135M model can learn in minutes.

`reverse` a list of words, `sort` a list of numbers, `extract` the fields of an order from a sentence. Prompts are plain text
that ends where the answer begins; an answer is right when it equals the expected string.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WORDS = (
    "apple river stone cloud tiger piano green chair bread house light train ocean paper sugar smile grass horse "
    "table music plant glass night water king bird snow fire road ship gold rose milk rain leaf moon star hand"
).split()
NAMES = "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Laura Martin Nora Oscar Paula Robert Sara Tom".split()
ITEMS = "lamps chairs books cups shirts pens plates hats bags clocks towels boxes".split()
CITIES = "Paris London Rome Berlin Madrid Vienna Oslo Dublin Boston Chicago Tokyo Sydney".split()
TEMPLATES = (
    "{name} from {city} ordered {count} {item}",
    "{count} {item} go to {name} in {city}",
    "Please send {count} {item} to {city} for {name}",
    "In {city}, {name} bought {count} {item}",
)


@dataclass(frozen=True)
class Item:
    """One question and its only right answer."""

    task: str
    prompt: str
    answer: str


def _reverse(rng: random.Random) -> Item:
    words = rng.sample(WORDS, rng.randint(4, 6))
    return Item("reverse", f"Reverse: {' '.join(words)} ->", " " + " ".join(reversed(words)))


def _sort(rng: random.Random) -> Item:
    numbers = [rng.randint(10, 99) for _ in range(rng.randint(3, 5))]
    return Item("sort", f"Sort: {' '.join(map(str, numbers))} ->", " " + " ".join(map(str, sorted(numbers))))


def _extract(rng: random.Random) -> Item:
    fields = {
        "name": rng.choice(NAMES),
        "city": rng.choice(CITIES),
        "item": rng.choice(ITEMS),
        "count": rng.randint(2, 99),
    }
    sentence = rng.choice(TEMPLATES).format(**fields)
    answer = f" name: {fields['name']}, city: {fields['city']}, item: {fields['item']}, count: {fields['count']}"
    return Item("extract", f"Extract: {sentence} ->", answer)


TASKS = {"reverse": _reverse, "sort": _sort, "extract": _extract}


def items(seed: int, count: int) -> Iterator[Item]:
    """`count` items, the tasks in turn; the same seed gives the same items."""
    rng = random.Random(seed)
    makers = list(TASKS.values())
    for i in range(count):
        yield makers[i % len(makers)](rng)


def held_out(seed: int, count: int, training: set[str]) -> list[Item]:
    """`count` items whose prompts are not among `training`."""
    fresh = (item for item in items(seed, 10 * count) if item.prompt not in training)
    return [item for item, _ in zip(fresh, range(count), strict=False)]


def write_jsonl(path: str | Path, chosen: list[Item]) -> None:
    """The items as prompt/response lines for `polydecode train`."""
    lines = [json.dumps({"prompt": i.prompt, "response": i.answer, "task": i.task}) for i in chosen]
    Path(path).write_text("\n".join(lines) + "\n")


def main() -> None:
    """Write training and held-out items: `python -m polydecode.demo.tasks FOLDER [COUNT]`."""
    import sys

    folder, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60000
    folder.mkdir(parents=True, exist_ok=True)
    training = list(items(1, count))
    write_jsonl(folder / "train.jsonl", training)
    write_jsonl(folder / "held_out.jsonl", held_out(2, 300, {i.prompt for i in training}))


if __name__ == "__main__":
    main()
