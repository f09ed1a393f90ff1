"""Makes two servers of one machine share no memory, as two machines would not.

SGLang finds out which processes may exchange messages through shared memory, and takes sockets between all others.
Python imports this module at start-up when its folder is on ``PYTHONPATH``.
"""

from patching import complete_cpu, patch_when_imported


def part(module):
    """Every rank is a machine of its own."""

    def in_the_same_node_as(pg, source_rank=0):
        return [rank == source_rank for rank in range(module.torch.distributed.get_world_size(pg))]

    module.in_the_same_node_as = in_the_same_node_as


patch_when_imported("sglang.srt.distributed.parallel_state", part)
complete_cpu()
