"""What the ranks of a model compute together: sums of their products, and logits put together.

A sum is as fast as its size lets it be. NCCL is general. Over NVLink a kernel can also read what
the other GPUs have written to memory that all of them see (symmetric memory): everything at once
(one-shot), which takes one meeting; or its share, and then the shares that the others have summed
(two-shot), which takes two and moves less. Microseconds of a sum of [tokens, 4096] bfloat16 in a
graph, on two H200s (`bench sums`):

    tokens      1     8    32   128   256   2,048
    NCCL     11.0  11.5  13.0  18.8  31.8    78
    one-shot  7.0   7.3   9.1  14.3  19.9    98
    two-shot  7.1   8.1   8.5  11.1  14.1    60

On CPUs, and between machines, the process group's own sums are used. All of them give every rank
the same numbers.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from paged.parallel.ranks import check_ranks
from paged.parallel.shard import Part

ONE_SHOT, TWO_SHOT = 128 << 10, 16 << 20


def way_of_sum(num_bytes: int, size: int) -> str:
    """How to add up so many bytes of each of `size` ranks that share memory: "one-shot", "two-shot"
    or "nccl".

    Measured for two ranks. With more of them one-shot reads as much from every other one, so that
    its limit is lower.
    """
    if num_bytes * (size - 1) <= ONE_SHOT:
        return "one-shot"
    return "two-shot" if num_bytes <= TWO_SHOT else "nccl"


class Sums:
    """Sums and gathers over the process group of the ranks that hold the parts of a model.

    Args:
        part: which one this rank holds.
        max_rows, dtype, device: of the logits.
    """

    def __init__(self, part: Part, max_rows: int, dtype: torch.dtype, device: torch.device):
        self.part = part
        # What of the logits this rank computes; one buffer, as graphs read it.
        self._scores = torch.empty(max_rows, part.config.vocab_size, dtype=dtype, device=device)
        on_one_machine = os.environ.get("LOCAL_WORLD_SIZE", str(part.size)) == str(part.size)
        self._shared = (shared_memory(device, dist.group.WORLD)
                        if device.type == "cuda" and on_one_machine else None)

    def sum(self, x: Tensor) -> Tensor:
        """x, in place, added up over the ranks."""
        dist.all_reduce(x)
        return x

    def place(self, x: Tensor) -> Tensor:
        """Where a rank is to write its summand of what will be like x [tokens, hidden]: the memory
        that the sum reads; x itself where that is as good."""
        if self._shared is None or self._way(x) == "nccl":
            return x
        return self._shared[:x.nbytes].view(x.dtype).view(x.shape)

    def total(self, summand: Tensor, x: Tensor) -> Tensor:
        """The sum over ranks of what is in `place(x)`, written to x."""
        if summand is x:
            return self.sum(x)
        assert dist.group.WORLD is not None
        group = dist.group.WORLD.group_name
        if self._way(x) == "one-shot":
            return torch.ops.symm_mem.one_shot_all_reduce_out(summand, "sum", group, x)
        return x.copy_(torch.ops.symm_mem.two_shot_all_reduce_(summand, "sum", group))

    def _way(self, x: Tensor) -> str:
        # The kernels move 16 bytes a thread, of these two dtypes.
        if x.nbytes % (16 * self.part.size) or x.dtype not in (torch.bfloat16, torch.float32):
            return "nccl"
        return way_of_sum(x.nbytes, self.part.size)

    def scores(self, num_rows: int) -> Tensor:
        """Where a rank is to write its columns of the logits."""
        return self._scores[:num_rows]

    def gather(self, scores: Tensor, logits: Tensor) -> None:
        """Write the columns of all ranks to logits [rows, vocab]."""
        everyone = scores.new_empty(self.part.size, *scores.shape)
        # Newer PyTorch has it under another name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(everyone.flatten(0, 1), scores)
        logits.copy_(everyone.transpose(0, 1).flatten(1)[:, :logits.shape[1]])

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for what a GPU does together with others, as long as they live: without one of them
        it never ends."""
        while not event.query():
            check_ranks()
            time.sleep(0)
        check_ranks()  # a process group that was given up ends what runs


@lru_cache(maxsize=1)
def shared_memory(device: torch.device, group: dist.ProcessGroup) -> Tensor | None:
    """TWO_SHOT bytes that every rank's GPU sees, one such tensor a group; None where they cannot.

    Every rank must ask for it, and all get the same answer. NVLink multicast stays off: it is not
    needed, and not every host allows it.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    found = None
    try:
        import torch.distributed._symmetric_memory as symmetric

        found = symmetric.empty(TWO_SHOT, dtype=torch.uint8, device=device)
        symmetric.rendezvous(found, group.group_name)
    except (ImportError, RuntimeError):  # an old PyTorch, or GPUs that do not see each other
        found = None
    everybody = torch.tensor(int(found is not None), device=device)
    dist.all_reduce(everybody, dist.ReduceOp.MIN)
    return found if everybody.item() else None
