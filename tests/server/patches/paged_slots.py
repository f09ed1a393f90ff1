"""SGLang's allocator of pages, whose kernels run only on GPUs, in plain Python."""


class Launched:
    """Stands for a kernel: ``kernel[grid](...)``."""

    def __init__(self, run):
        self._run = run

    def __getitem__(self, grid):
        return self._run


def extend(prefix_lens, seq_lens, last_slots, free_pages, out, _block, page_size, *_more):
    """Write slots for positions ``prefix_lens[i]..seq_lens[i]-1`` of every request, one after the other."""
    free, slots = iter(free_pages.tolist()), []
    for prefix, length, slot in zip(prefix_lens.tolist(), seq_lens.tolist(), last_slots.tolist(), strict=True):
        place = slot
        for position in range(prefix, length):
            place = next(free) * page_size if position % page_size == 0 else place + 1
            slots.append(place)
    out.copy_(out.new_tensor(slots))


def decode(seq_lens, last_slots, free_pages, out, _block, page_size, *_more):
    """Write a slot for the last position of every request."""
    free, ends = iter(free_pages.tolist()), zip(seq_lens.tolist(), last_slots.tolist(), strict=True)
    slots = [next(free) * page_size if length % page_size == 1 else last + 1 for length, last in ends]
    out.copy_(out.new_tensor(slots))


def install(module):
    """Give SGLang's module of the allocator these functions."""
    module.alloc_extend_kernel, module.alloc_decode_kernel = Launched(extend), Launched(decode)
