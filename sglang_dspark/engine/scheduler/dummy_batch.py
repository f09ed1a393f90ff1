"""Make decode batches for warming up and timing steps before the first request arrives."""

from types import SimpleNamespace, TracebackType
from typing import Self

import torch

from sglang_dspark.engine.forward.layers import slot_translation
from sglang_dspark.engine.scheduler.batch import decode_batch
from sglang_dspark.engine.scheduler.draft_input import DSparkDraftInput
from sglang_dspark.engine.sglang_types import ScheduleBatch, TpModelWorker

_FIRST_SLOT = 1  # slot 0 is padding
# Tokens differ from request to request: a forward whose tokens all choose the same experts looks cheaper than it is.
_FIRST_TOKEN, _STRIDE = 11, 7919

# If layers of a target keep more than K/V, SGLang asks each request where the radix cache wants it next. Rows that no
# request has taken name slot 0 for that: padding.
_NO_REQUEST = SimpleNamespace(rid="", lora_id=None, token_type_ids=None, kv=SimpleNamespace(mamba_next_track_idx=0))


class DummyBatch:
    """Stand for ``requests`` running requests with ``context`` committed tokens each.

    As a context manager it borrows rows of ``req_to_token`` and slots of the pool, which nothing uses yet, and clears
    the rows at the end. Requests take turns at the slots, as they do when they decode together. A step consumes its
    batch: take a :meth:`fresh` one for each.
    """

    def __init__(self, target_worker: TpModelWorker, requests: int, context: int, window: int) -> None:
        self._runner = target_worker.model_runner
        self._requests, self._context, self._window = requests, context, window

    def __enter__(self) -> Self:
        table = self._runner.req_to_token_pool.req_to_token
        columns = self._context + self._window
        slots = torch.arange(columns * self._requests, device=table.device) % (self._num_slots - _FIRST_SLOT)
        rows = torch.arange(self._requests, device=table.device)
        table[rows, :columns] = (slots.view(columns, -1).T + _FIRST_SLOT).to(table.dtype)
        pool = self._runner.token_to_kv_pool
        if (translation := slot_translation(pool)) is not None:
            # Rows of their own, as far as there are some: one for all slots would never leave the cache of a GPU.
            every = torch.arange(self._num_slots, device=table.device)
            translation[_FIRST_SLOT + every] = every % pool.size_swa + _FIRST_SLOT
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.req_to_token_pool.req_to_token[: self._requests, : self._context + self._window] = 0
        if (translation := slot_translation(self._runner.token_to_kv_pool)) is not None:
            translation[:-1] = 0  # the last entry says -1 of -1

    @property
    def _num_slots(self) -> int:
        return int(self._runner.token_to_kv_pool.size)

    @property
    def device(self) -> torch.device:
        """Return the device of its tensors."""
        return torch.device(self._runner.device)

    def tokens(self, num: int) -> torch.Tensor:
        """Return [requests, num] int64 tokens that are spread over the vocabulary."""
        places = torch.arange(self._requests * num, device=self._runner.device).view(num, -1).T
        return (_FIRST_TOKEN + _STRIDE * places) % int(self._runner.model_config.vocab_size)

    def fresh(self) -> ScheduleBatch:
        """Return the batch as the scheduler would hand it over."""
        device = self._runner.device
        tracked = getattr(self._runner.req_to_token_pool, "enable_mamba_extra_buffer", False)
        batch = decode_batch(
            self._runner,
            [_NO_REQUEST] * self._requests if tracked else [],
            torch.arange(self._requests, dtype=torch.int64, device=device),
            torch.full((self._requests,), self._context, dtype=torch.int64, device=device),
            [self._context] * self._requests,
        )
        batch.spec_info = DSparkDraftInput(
            bonus_tokens=self.tokens(1)[:, 0].contiguous(),
            new_seq_lens=batch.seq_lens,
            nxt_kv_lens_cpu=batch.seq_lens_cpu + 2 * self._window,
        )
        return batch
