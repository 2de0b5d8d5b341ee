"""Decoding by blocks: the state, the prefill, and the step that is one forward.

Every row fills its own block at its own pace, so in one pass some rows write a finished block and start the next while
others go on with theirs.

Legend: B rows, P prompt tokens, W tokens of the widest row in a pass, N masked tokens, K keys, D width, V vocabulary.
"""

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polydecode.errors import UserNotice
from polydecode.methods.base import Choose
from polydecode.methods.batch import Step, left_aligned
from polydecode.methods.block_diffusion.commit import chosen, random_scores, scores
from polydecode.ops.cache import KVCache, append, prompt_plan

if TYPE_CHECKING:
    from polydecode.methods.block_diffusion.model import BlockDiffusionModel

MASKED = -1
"""In `Row.block`: not known yet."""


@dataclass
class Row:
    """One row in decoding.

    `written`: tokens whose final keys and values are in the cache. `finished`: the tokens of a full block behind them, not
    written yet. `block`: the block being filled, MASKED where unknown; `shown`: how many of its first tokens have been
    handed out; `forwards`: how many it took so far. `before_D`: with a token shift, the hidden state that predicts the block's
    first token. `text`: all known tokens before the block, where nothing is cached.
    """

    written: int
    size: int
    threshold: float | None
    steps: int | None
    selector: str
    seed: int
    block: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    shown: int = 0
    forwards: int = 0
    before_D: Tensor | None = None
    text: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The position of the block's first token."""
        return self.written + len(self.finished)

    @property
    def masked(self) -> list[int]:
        """The places of the block that are not known."""
        return [i for i, token in enumerate(self.block) if token == MASKED]


@dataclass
class BlockDiffusionState:
    """A batch in decoding: one cache, and what each row is about."""

    cache: KVCache
    rows: list[Row]


def warn_above_trained(sizes: list[int], trained: int) -> None:
    """Say, once per process, that a block size above the trained one is asked for."""
    if max(sizes) > trained:
        warnings.warn(
            f"block_size {max(sizes)} is above the trained {trained}; quality may fall", UserNotice, stacklevel=4
        )


def prefill(
    model: "BlockDiffusionModel",
    input_ids: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, list],
    seeds: list[int],
) -> BlockDiffusionState:
    """Read the prompts and open each row's first block."""
    prompts = left_aligned(input_ids, attention_mask)
    lengths = prompts.length_B.tolist()
    rows = [
        Row(
            written=lengths[b],
            size=options["block_size"][b],
            threshold=options["threshold"][b],
            steps=options["steps"][b],
            selector=options["selector"][b],
            seed=seeds[b],
            text=prompts.input_ids_BP[b, : lengths[b]].tolist(),
        )
        for b in range(len(lengths))
    ]
    state = BlockDiffusionState(KVCache(model.stack.num_layers, len(rows)), rows)
    for row in rows:
        _open_block(model, row)
    if model.config.attention != "bidirectional":
        _read_prompts(model, state, prompts.input_ids_BP, prompts.length_B)
    return state


def _read_prompts(model: "BlockDiffusionModel", state: BlockDiffusionState, ids_BP: Tensor, length_B: Tensor) -> None:
    stack, cache = model.stack, state.cache
    num_rows, width = ids_BP.shape
    position_BP = torch.arange(width, device=ids_BP.device).expand(num_rows, -1)
    cache.plan(prompt_plan(cache, length_B, width))

    def real(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < length_B[b]) | (q == k)

    if model.config.prompt_attention == "causal":
        hidden_BPD = stack.embed(ids_BP)
        hidden_BPD = stack.run(hidden_BPD, 0, stack.num_layers, stack.attention(hidden_BPD, position_BP), cache)
    else:
        hidden_BPD = stack.read(ids_BP, position_BP, real, cache=cache)
    if model.config.token_shift:
        for b, row in enumerate(state.rows):
            row.before_D = hidden_BPD[b, row.written - 1]


def _open_block(model: "BlockDiffusionModel", row: Row) -> None:
    """A new block behind what is known; shorter only where the model's context ends."""
    room = model.config.max_position_embeddings - row.start
    row.block = [MASKED] * max(min(row.size, room), 1)
    row.shown = row.forwards = 0


def step(model: "BlockDiffusionModel", state: BlockDiffusionState, choose: Choose) -> Step:
    """One forward for every row, and what can be handed out after it: the tokens before a row's first masked one."""
    rows = state.rows
    forwards = 0.0
    if model.config.attention == "bidirectional":
        hidden_ND = _uncached(model, state)
    else:
        waiting = [b for b, row in enumerate(rows) if row.finished]
        if waiting and not model.config.fuse_write:
            _pass(model, state, waiting, with_block=False)
            forwards += 1
        hidden_ND = _pass(model, state, list(range(len(rows))), with_block=True)
    forwards += 1
    logits_NV = model.stack.head(model.stack.norm(hidden_ND))
    logits_NV[:, model.mask_token_id] = -torch.inf
    owner = [b for b, row in enumerate(rows) for _ in row.masked]
    token_N = choose(logits_NV, owner)
    _commit(rows, logits_NV, token_N)
    shown = [_hand_out(model, row) for row in rows]
    width = max(1, *map(len, shown))
    tokens_BW = torch.tensor([s + [0] * (width - len(s)) for s in shown], device=token_N.device)
    drafts = [[model.mask_token_id if t == MASKED else t for t in row.block[row.shown :]] for row in rows]
    return Step(tokens_BW, torch.tensor([len(s) for s in shown], device=token_N.device), forwards, drafts)


def _pass(model: "BlockDiffusionModel", state: BlockDiffusionState, taking_part: list[int], with_block: bool) -> Tensor:
    """Run the finished block (if any) and, unless it is only to be written, the open block of the rows taking part.

    Returns the hidden states (N, D) that predict the masked tokens, row by row; the finished blocks are written then.
    """
    rows, device = [state.rows[b] for b in taking_part], model.device
    starts = [row.written for row in rows]
    texts = [row.finished + (row.block if with_block else []) for row in rows]
    stops = [start + len(text) for start, text in zip(starts, texts, strict=True)]
    append_ = append(state.cache, starts, stops, taking_part, device)
    width = append_.position_ids_RT.shape[1]
    border_R = torch.tensor([row.start for row in rows], device=device)
    stop_R = torch.tensor(stops, device=device)
    position_RW = append_.position_ids_RT

    def before_the_open_block(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        end = torch.where(position_RW[b, q] < border_R[b], border_R[b], stop_R[b])
        return k < end

    in_step = len(set(starts)) == len(set(stops)) == 1 and not any(row.finished for row in rows)
    state.cache.plan(append_.plan)
    ids_RW = _with_filler(model, texts, width)
    pattern = None if in_step else before_the_open_block  # a block alone reads all there is
    hidden_RWD = model.stack.read(ids_RW, position_RW, pattern, append_.key_positions_1K, state.cache)
    for r, row in enumerate(rows):
        if row.finished and model.config.token_shift:
            row.before_D = hidden_RWD[r, width - (len(row.block) if with_block else 0) - 1]
        row.written, row.finished = row.start, []
    return _predicting(model, rows, hidden_RWD, width) if with_block else hidden_RWD[:0, 0]


def _with_filler(model: "BlockDiffusionModel", texts: list[list[int]], width: int) -> Tensor:
    """Token ids (B, W) of texts that end at the last column; the mask token where a text is MASKED."""
    ids = [[0] * (width - len(t)) + [model.mask_token_id if i == MASKED else i for i in t] for t in texts]
    return torch.tensor(ids, device=model.device)


def _predicting(model: "BlockDiffusionModel", rows: list[Row], hidden_RWD: Tensor, width: int) -> Tensor:
    """The hidden states (N, D) that predict each masked token: its own, or with a token shift the one before it."""
    shift = int(model.config.token_shift)
    where = [(r, width - len(row.block) + i - shift) for r, row in enumerate(rows) for i in row.masked]
    index = torch.tensor(where, device=hidden_RWD.device)
    hidden_ND = hidden_RWD[index[:, 0], index[:, 1].clamp_min(0)]
    if shift:
        first = [n for n, (i, row) in enumerate((i, row) for row in rows for i in row.masked) if i == 0]
        if first:
            hidden_ND = hidden_ND.clone()
            before = [row.before_D for row in rows if row.block[0] == MASKED]
            hidden_ND[first] = torch.stack([h for h in before if h is not None])
    return hidden_ND


def _uncached(model: "BlockDiffusionModel", state: BlockDiffusionState) -> Tensor:
    """The same without a cache, every token reading the whole text: all that bidirectional attention allows."""
    rows, device = state.rows, model.device
    texts = [row.text + row.block for row in rows]
    width = max(map(len, texts))
    filler_B = torch.tensor([width - len(t) for t in texts], device=device)
    position_BW = (torch.arange(width, device=device) - filler_B[:, None]).clamp_min(0)

    def real(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((k >= filler_B[b]) & (q >= filler_B[b])) | (q == k)

    hidden_BWD = model.stack.read(_with_filler(model, texts, width), position_BW, real)
    if model.config.token_shift:
        for r, row in enumerate(rows):
            row.before_D = hidden_BWD[r, width - len(row.block) - 1]
    for row in rows:
        row.written, row.finished = row.start, []
    return _predicting(model, rows, hidden_BWD, width)


def _commit(rows: list[Row], logits_NV: Tensor, token_N: Tensor) -> None:
    """Put the proposed tokens of `choose` into the blocks where they are sure enough."""
    tokens, start = token_N.tolist(), 0
    by_selector = {s: scores(logits_NV, token_N, s) for s in {row.selector for row in rows} if s != "random"}
    for row in rows:
        masked = row.masked
        span = slice(start, start + len(masked))
        start = span.stop
        if row.selector == "random":
            score_N = random_scores(row.seed, row.forwards, [row.start + i for i in masked])
        else:
            score_N = by_selector[row.selector][span]
        left = None if row.steps is None else row.steps - row.forwards
        for i in chosen(score_N, row.threshold, left):
            row.block[masked[i]] = tokens[span][i]
        row.forwards += 1


def _hand_out(model: "BlockDiffusionModel", row: Row) -> list[int]:
    """The tokens of a row that have become known up to its first masked one; opens the next block behind a full one."""
    masked = row.masked
    known = masked[0] if masked else len(row.block)
    new = row.block[row.shown : known]
    row.shown = known
    if not masked:
        row.finished = row.block
        row.text = row.text + row.block
        _open_block(model, row)
    return new
