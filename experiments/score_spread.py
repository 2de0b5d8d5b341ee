"""Block diffusion's `score` against Monte Carlo: `python experiments/score_spread.py CHECKPOINT [ITEMS] [DRAWS]`.

`score` is the chain rule left to right in each block, one pass per place, no noise. The usual estimate of a masked diffusion
model's likelihood is the bound E[sum of log p / t] over random masks (equation 1). Prints both per token, and by how much
the second moves from one set of draws to the next.
"""

import sys

import torch

from polydecode import load, load_tokenizer
from polydecode.config import DataConfig
from polydecode.data import Collator, encode
from polydecode.demo.tasks import held_out, items
from polydecode.methods.batch import Batch
from polydecode.ops.losses import token_cross_entropy
from polydecode.ops.sampling import RowGenerators, mix_seed

GROUPS = 4


def main() -> None:
    checkpoint = sys.argv[1]
    count, draws = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((2, 24), (3, 64)))
    model, tokenizer = load(checkpoint, dtype="float32"), load_tokenizer(checkpoint)
    model.config.half_life_ratio = None  # the bound is over uniform masks
    model.config.noise_draws = 1
    model.config.fill_last_block = False
    questions = held_out(2, count, {i.prompt for i in items(1, 60000)})
    examples = [
        encode({"prompt": q.prompt, "response": q.answer}, tokenizer, DataConfig(data=["-"])) for q in questions
    ]
    batch = Batch(**Collator(0)(examples))
    score = model.score(batch)
    tokens = int(score.num_targets.sum())
    bounds = torch.zeros(GROUPS, count)
    with torch.no_grad():
        for draw in range(draws):
            generators = RowGenerators([mix_seed(draw, i) for i in range(count)])
            noisy, context, is_masked, level = model._noise(batch, generators)
            hidden = model._masked_hidden(noisy, context, is_masked, is_masked, torch.device("cpu"))
            loss, _ = token_cross_entropy(hidden, noisy.token[is_masked], model.stack.head)
            bounds[draw % GROUPS].index_add_(0, is_masked.nonzero()[:, 0], -loss / level[is_masked])
    bounds *= GROUPS / draws
    per_token = score.log_likelihood.sum() / tokens
    print(f"{count} items, {tokens} target tokens, {draws} draws in {GROUPS} groups of {draws // GROUPS}")
    print(f"score, left to right in each block:  {per_token:.4f} nats per token, spread 0 (deterministic)")
    print(f"Monte Carlo bound, all draws:        {bounds.mean(0).sum() / tokens:.4f}")
    print("Monte Carlo bound, by group:         " + " ".join(f"{g.sum() / tokens:.4f}" for g in bounds))
    print(f"standard deviation of an item's bound between groups: {bounds.std(0).mean():.3f} nats per item")
    both = torch.stack([score.log_likelihood, bounds.mean(0)])
    print(f"correlation over items of score and bound: {torch.corrcoef(both)[0, 1]:.3f}")


if __name__ == "__main__":
    main()
