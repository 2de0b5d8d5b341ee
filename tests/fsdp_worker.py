"""One of two gloo processes: a tiny model of each method sharded with FSDP2 (`fully_shard` on every layer and the wrapper),
against the whole one. Prints OK and the differences; run by test_distributed.py."""

import os
import sys
from copy import deepcopy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from polydecode.data import Collator, Example
from polydecode.methods.batch import Batch
from polydecode.ops.sampling import RowGenerators
from polydecode.train.distributed import make_whole
from tiny import tiny_base, tiny_model


def batch_and_noise(examples: list[Example]) -> tuple[Batch, RowGenerators]:
    return Batch(**Collator(0)(examples)), RowGenerators([e.example_id for e in examples])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    examples = [
        Example(
            [3 + (7 * i + j) % 50 for j in range(9 + i)],
            [True] * 3 + [False] * (6 + i),
            [False] * 3 + [True] * (6 + i),
            i,
        )
        for i in range(4)
    ]
    for method in ("autoregressive", "dmtd", "block_diffusion"):
        for tied in (False, True):
            whole = tiny_model(method, tiny_base(tie_word_embeddings=tied)).train()
            sharded = deepcopy(whole)
            for layer in sharded.stack.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(sharded, mesh=mesh)
            optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, sharded)]
            for _ in range(3):
                mine = examples[2 * rank : 2 * rank + 2]
                counts = torch.tensor(float(whole.num_targets(*batch_and_noise(examples))))
                batch, noise = batch_and_noise(mine)
                part = sharded(batch=batch, generator=noise)
                (part.loss * part.num_targets / counts * 2).backward()
                batch, noise = batch_and_noise(examples)
                whole.loss(batch, noise).loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            make_whole(sharded)
            after = sharded.state_dict()
            difference = max(float((v - after[k]).abs().max()) for k, v in whole.state_dict().items())
            same_tie = (sharded.get_input_embeddings().weight is sharded.get_output_embeddings().weight) == tied
            if difference > 1e-7 or not same_tie:
                sys.exit(f"{method} tied={tied}: difference {difference}, tie kept {same_tie}")
            if rank == 0:
                print("OK", method, tied, difference, flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # see polydecode.__main__: gloo's threads may die of the interpreter's end


if __name__ == "__main__":
    main()
