"""distributed.py: groups of torch.distributed as `mdkv.Ranks`, for heads in host memory (gloo):

    prompt = mdkv.Prompt(preset, layers=L, heads=own, ..., ranks=mdkv.distributed.ranks(own, group))

A process that ends, or that raises elsewhere, leaves the others to the group's timeout.
"""
import torch
import torch.distributed as dist

import mdkv

def expects_same(name, value, group=None):
    """Raises ValueError in every process if a value, such as a number or None, is not the same in all of them."""
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise ValueError(f"mdkv: {name} of rank {rank} is {other}, of rank 0 {everyone[0]}; it must be the same on all ranks")


def ranks(own, group=None):
    """The ranks of a group whose processes have `own` KV heads each, in the order of the processes; every process makes the
    call. Processes may have different numbers of heads, or none. group: a ProcessGroup; None: all processes."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    counts = torch.zeros(size, dtype=torch.int64)
    counts[rank] = own
    dist.all_reduce(counts, dist.ReduceOp.SUM, group)

    def total(numbers):
        dist.all_reduce(torch.from_numpy(numbers), dist.ReduceOp.SUM, group)

    return mdkv.Ranks(total, first_head=int(counts[:rank].sum()), heads=int(counts.sum()))
