"""distributed.py: groups of torch.distributed as `mdkv.Ranks`, for heads in host memory (gloo):

    prompt = mdkv.Prompt(preset, layers=L, heads=own, ..., ranks=mdkv.distributed.ranks(own, group))

A process that ends, or that raises elsewhere, leaves the others to the group's timeout.
"""
import numpy as np
import torch
import torch.distributed as dist

import mdkv

_SIGN = np.uint64(1 << 63)


def functions(group=None):
    """`sum` and `least` of `mdkv.Ranks` over a group; None: all processes. Minima are of signed integers in torch, so the
    highest bit is turned before and after."""
    def total(numbers):
        dist.all_reduce(torch.from_numpy(numbers), dist.ReduceOp.SUM, group)

    def least(numbers):
        numbers ^= _SIGN
        dist.all_reduce(torch.from_numpy(numbers.view(np.int64)), dist.ReduceOp.MIN, group)
        numbers ^= _SIGN

    return {"sum": total, "least": least}


def summed(numbers, group=None):
    """A list of whole numbers, of which every process of a group gives as many, summed over the processes."""
    sums = np.array(numbers, np.int64)
    functions(group)["sum"](sums)
    return sums.tolist()


def expects_same(name, value, group=None):
    """Raises ValueError in every process if a value, such as a number or None, is not the same in all of them."""
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise ValueError(f"mdkv: {name} of rank {rank} is {other}, of rank 0 {everyone[0]}; it must be the same on all ranks")


def ranks(own, group=None, *, first_layer=0, layers=None):
    """The ranks of a group whose processes have `own` KV heads each, in the order of the processes; every process makes the
    call. Processes may have different numbers of heads, or none. group: a ProcessGroup; None: all processes. first_layer and
    layers: see `mdkv.Ranks`. Replicas, and grids of heads and layers, need an `mdkv.Ranks` of the caller's, with `functions`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counts = torch.zeros(size, dtype=torch.int64)
    counts[rank] = own
    dist.all_reduce(counts, dist.ReduceOp.SUM, group)
    return mdkv.Ranks(rank, size, **functions(group), first_head=int(counts[:rank].sum()), heads=int(counts.sum()),
                      first_layer=first_layer, layers=layers)
