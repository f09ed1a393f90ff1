"""SGLang's work before a server decodes, each part left undone once."""

import pytest
import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang_objects import model_config, partly, runner, table

from sglang_dspark.engine import draft_input, scheduler
from sglang_dspark.engine.scheduler import check_start
from sglang_dspark.errors import EngineError

WINDOW, CONTEXT = 8, 100


def started(*, slots=64, free=64, columns=CONTEXT + 2 * WINDOW + 1, captures=True):
    return runner(
        token_to_kv_pool=partly(MHATokenToKVPool, size=slots),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(free, torch.float32, "cpu", None, need_sort=False),
        req_to_token_pool=table(2, columns),
        model_config=model_config(context_len=CONTEXT),
        model=partly(Qwen3ForCausalLM, capture_aux_hidden_states=captures),
    )


@pytest.fixture(autouse=True)
def resolved(monkeypatch):
    """SGLang's tokens per step; the test may set others."""
    found = {"tokens": WINDOW}
    for module in (scheduler, draft_input):
        monkeypatch.setattr(module, "tokens_per_step", lambda: found["tokens"])
    return found


def test_a_start_as_it_should_be():
    check_start(started(), WINDOW, captures=True)
    check_start(started(captures=False), WINDOW, captures=False)


def test_a_reservation_by_raw_arguments_ends_the_start(resolved):
    resolved["tokens"] = 1
    with pytest.raises(EngineError, match="reserves for 1 tokens per request and step, and DSPARK verifies up to 8"):
        check_start(started(), WINDOW, captures=True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"slots": 128}, "pool has 128 slots and their allocator 64"),
        ({"columns": CONTEXT + WINDOW}, "have 108 columns, and a request may need 117"),
        ({"captures": False}, "does not return the hidden states"),
    ],
)
def test_what_was_not_done_is_named(fields, says):
    with pytest.raises(EngineError, match=says):
        check_start(started(**fields), WINDOW, captures=True)


def test_a_release_whose_requests_end_elsewhere(monkeypatch):
    """A request gets another such method for a step: where SGLang calls something else, that would do nothing."""

    class Req:
        def update_finish_state(self, tokens):
            """With other arguments."""

    monkeypatch.setattr(scheduler, "Request", Req)
    with pytest.raises(EngineError, match="update_finish_state, which looks for the end of a text"):
        check_start(started(), WINDOW, captures=True)
