"""The demo's table, picture and samples."""

from collections.abc import Sequence
from pathlib import Path

from polydecode.demo.measure import Row
from polydecode.demo.tasks import Item


def table(rows: Sequence[Row]) -> str:
    """An aligned text table."""
    tasks = [t for t in rows[0].accuracy if t != "all"]
    header = ["", *tasks, "all", "kept", "tok/s", "speed-up", "tok/forward"]
    lines = [header]
    for row in rows:
        cells = [f"{row.accuracy[t]:.2f}" for t in tasks]
        kept = "-" if row.kept is None else f"{row.kept:.0%}"
        speedup = "-" if row.speedup is None else f"{row.speedup:.2f}x"
        lines.append(
            [row.name, *cells, f"{row.accuracy['all']:.2f}", kept, f"{row.tokens_per_s:.1f}", speedup,
             f"{row.tokens_per_forward:.2f}"]
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def samples(items: Sequence[Item], rows: Sequence[Row], count: int = 2) -> str:
    """The first item of `count` tasks, with what each way answered."""
    chosen = list({item.task: i for i, item in reversed(list(enumerate(items)))}.values())[-count:]
    blocks = []
    width = max(len(r.name) for r in rows)
    for i in sorted(chosen):
        lines = [f"{items[i].prompt}", f"  {'expected':{width}} {items[i].answer.strip()}"]
        for row in rows:
            answer = row.answers[i].strip().split("\n")[0]
            mark = "+" if row.answers[i].strip() == items[i].answer.strip() else "-"
            lines.append(f"{mark} {row.name:{width}} {answer[:90]}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


COLORS = ("#c2410c", "#1d4ed8", "#15803d")
"""One per method, in the order of the rows."""


def picture(rows: Sequence[Row], path: Path) -> None:
    """Accuracy against speed-up, one point per row, and the table beneath it, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [(r, r.tokens_per_s / rows[1].tokens_per_s) for r in rows]
    figure, (axis, below) = plt.subplots(2, 1, figsize=(9, 7.4), height_ratios=(3, 2))
    methods = list(dict.fromkeys(row.method for row in rows if row.is_converted))
    for row, speedup in timed:
        color = COLORS[methods.index(row.method) % len(COLORS)] if row.is_converted else "#444444"
        axis.scatter(speedup, row.accuracy["all"], color=color, zorder=3)
        axis.annotate(
            row.name, (speedup, row.accuracy["all"]), textcoords="offset points", xytext=(2, 7), rotation=35, fontsize=8
        )
    for method, color in zip(methods, COLORS, strict=False):
        curve = [(speedup, row.accuracy["all"]) for row, speedup in timed if row.is_converted and row.method == method]
        axis.plot(*zip(*sorted(curve), strict=True), color=color, alpha=0.4, label=method)
    axis.legend(loc="lower right", fontsize=9)
    axis.set_xlabel("tokens/s relative to the AR control (bfloat16, batch 1)")
    axis.set_ylabel("exact-match accuracy, held-out items")
    axis.set_ylim(-0.05, 1.4)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axis.margins(x=0.12)
    axis.grid(alpha=0.3)
    axis.set_title("SmolLM2-135M-Instruct: several tokens per forward pass, speed and quality")
    below.axis("off")
    below.text(0, 1, table(rows), family="monospace", fontsize=9.5, va="top")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
