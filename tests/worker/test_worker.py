"""Tests of ranks that follow rank 0, of every switch of the network, and of attention of draft blocks."""

import json
from collections import deque

import numpy as np
import pytest
import torch
from canonical_drafter import config_json, random_tensors
from dspark_kernels import StepRequests, kernels_anywhere
from golden_server import CASES
from literal import LiteralDraft
from reference_decoding import attend_dense, block_mask
from safetensors.torch import save_file
from stage_loop import StageLoop
from step_tables import make_table
from switches import SWITCHES

from sglang_dspark.draft.backbone import DraftWindow
from sglang_dspark.draft.config import Visibility
from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.scheduling.sps_table import LoadTimes, SpsTable
from sglang_dspark.worker.buffers import MAX_SAMPLED, MAX_TOKENS, Tiers, at_least
from sglang_dspark.worker.draft_attention import block_attention

NUM_TOKENS = 12


class FirstRank:
    """Tells the others what it has."""

    needed = leads = True

    def __init__(self):
        self.told = deque()

    def share(self, value):
        self.told.append(value)
        return value

    def broadcast_from_rank0(self, *tensors):
        self.told.append([None if tensor is None else tensor.clone() for tensor in tensors])


class OtherRank(FirstRank):
    """Takes over what it is told."""

    leads = False

    def __init__(self, first):
        self.told = first.told

    def share(self, value):
        return self.told.popleft()

    def broadcast_from_rank0(self, *tensors):
        for tensor, agreed in zip(tensors, self.told.popleft(), strict=True):
            assert (tensor is None) == (agreed is None)
            if tensor is not None:
                tensor.copy_(agreed)


def served(agreement, disturb, options):
    """Texts, and the rows of every verification."""
    # Drafts cost so much that `auto` verifies some of them only.
    table = make_table(lambda r, d, c: 10 + 2.5 * d * r, lambda r, d, c: 1 + 0 * r, gamma=7)
    loop, plans = StageLoop(table, **options), []
    loop.eager.agreement = agreement
    served_plan = loop.eager.plan

    def plan(*arguments):
        plans.append(served_plan(*arguments))
        return plans[-1]

    loop.eager.plan = plan
    if disturb:
        loop.noise_seed += 1
        with torch.no_grad():
            loop.drafter.model.confidence_head.proj.weight.neg_()
    prompts = [case["prompt_ids"] for case in CASES[:3]]
    return loop.serve(prompts, NUM_TOKENS, temperature=1.5), [each.input_ids.tolist() for each in plans]


@pytest.mark.parametrize(
    "options",
    [{"schedule": "static"}, {"schedule": "threshold", "confidence_threshold": 0.6}, {}],
    ids=lambda o: o.get("schedule", "auto"),
)
def test_ranks_that_differ_decode_the_same(options):
    first = FirstRank()
    texts, plans = served(first, False, options)
    assert served(OtherRank(first), True, options) == (texts, plans)
    assert served(FirstRank(), True, options) != (texts, plans)


V, SWITCHED_TOKENS = 7, 16
PROMPT = [1, 4, 4, 0, 6, 2, 5, 3, 1, 1, 6]  # the windows are narrower
PROPOSED = [1, 2, 4, 6]
GENERATOR = torch.Generator().manual_seed(7)
LOGITS = torch.randn((V, V, V), generator=GENERATOR)  # by the last two tokens
STATES = torch.randn((V, V, 3 * 24), generator=GENERATOR)
# Attention that looks hard at few rows and says much, or the switches would change next to nothing.
SPREAD = {"q_norm": 3, "k_norm": 3, "o_proj.weight": 3, "attention_sink_bias": 20}


def target(ids):
    """Logits [n, V] and tapped states [n, taps * d]; each depends on the token and its predecessor."""
    before, last = torch.tensor([0, *ids[:-1]]), torch.tensor(ids)
    return LOGITS[before, last], STATES[before, last]


class SwitchLoop(StageLoop):
    """Serves a random drafter next to that target."""

    def __init__(self, folder):
        model = load_draft_model(folder, dtype=torch.float32, device="cpu")
        self.set_up(model, target, None, {"schedule": "static"})


def written(folder, kind):
    """A drafter of random weights with these switches; returns ``folder``."""
    config = config_json(vocab_size=V, **SWITCHES[kind])
    if "draft_vocab_size" in config:
        config["draft_vocab_size"] = len(PROPOSED)
        save_token_ids(folder / "draft_vocabulary.json", PROPOSED)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, seed=5)
    for name in tensors:
        tensors[name] *= next((factor for part, factor in SPREAD.items() if part in name), 1)
    save_file(tensors, folder / "model.safetensors")
    return folder


def own_text(num_tokens):
    """Return the text that the target writes without any drafts."""
    text = list(PROMPT)
    while len(text) < len(PROMPT) + num_tokens:
        text.append(int(target(text)[0][-1].argmax()))
    return text[len(PROMPT) :]


def check_trace(folder, num_tokens):
    loop, literal = SwitchLoop(folder), LiteralDraft(folder)
    drafted = set()
    assert loop.serve([PROMPT], num_tokens) == [own_text(num_tokens)]
    for start, anchor, drafts, kept in loop.traces[0]:
        features = target(loop.texts[0][:start])[1].double()
        expected = literal.draft(features, anchor)[0]
        assert drafts == expected
        following = loop.texts[0][start + 1 :]
        assert drafts[:kept] == following[:kept]
        assert kept == len(drafts) or drafts[kept] != following[kept]
        drafted.add(tuple(drafts))
    assert len(drafted) > 1


@pytest.mark.parametrize("name", SWITCHES)
def test_greedy_traces_are_the_literal_drafters(name, tmp_path):
    check_trace(written(tmp_path, name), SWITCHED_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DFlash", "window from the slot, causal", "everything"])
def test_kernels_draft_the_same(name, tmp_path):
    with kernels_anywhere():
        check_trace(written(tmp_path, name), 5)


SLOTS = [1, 2, 4, 8, 12, 16, 24, 32, 40, 64]


def test_a_step_takes_the_smallest_tier_with_room():
    tiers = Tiers.of(SLOTS, 7)
    assert [at_least(tiers.requests, n) for n in (1, 3, 9, 64)] == [1, 4, 12, 64]
    assert at_least(tiers.requests, 65) is None
    assert [at_least(tiers.tokens, n) for n in (2, 16, 17, 511)] == [2, 16, 18, 512]
    assert at_least(tiers.tokens, 513) is None


def test_sampled_drafts_have_fewer_tiers():
    tiers = Tiers.of(SLOTS, 7)
    assert [at_least(tiers.sampled, n) for n in (1, 9, MAX_SAMPLED)] == [1, 16, 32]
    assert at_least(tiers.sampled, MAX_SAMPLED + 1) is None


@pytest.mark.parametrize("max_verify", [1, 5, 16])
def test_at_most_an_eighth_of_a_tier_is_padding(max_verify):
    tiers = Tiers.of([1, 256], max_verify)
    assert tiers.tokens[0] == 2
    assert tiers.tokens[-1] == min(256 * (max_verify + 1), MAX_TOKENS)
    for rows in range(2, tiers.tokens[-1] + 1):
        tier = at_least(tiers.tokens, rows)
        assert tier is not None
        assert tier - rows <= rows / 8


def test_a_server_that_never_verifies_has_plain_steps_only():
    assert Tiers.of([1, 2], 0) == Tiers((1, 2), (1, 2), ())


@pytest.mark.parametrize("requests", [1, 2, 16])
def test_plain_steps_have_times_of_their_own(requests):
    """Not those of a step that verifies a draft."""
    verify_ms = 10.0 + np.arange(8.0)[None, :, None]
    table = SpsTable({}, [1], range(8), [64], np.zeros((1, 8, 1)), verify_ms, Tiers.of([1, 2, 16], 7).timed)
    times = LoadTimes.of(table, requests)
    assert (times.num_tokens[0], times.drafts[0]) == (requests, 0)
    assert times.at(64)[0, 0] == 10.0


ATTENTION_SLOTS, HEADS, KV_HEADS, HEAD_DIM = 4, 6, 2, 16
PREFIXES = (0, 1, 7, 24, 30)
SCALE = 0.3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU Triton's interpreter runs the kernels

KINDS = {
    "full": Visibility(),
    "causal": Visibility(causal=True),
    "window from the anchor": Visibility(window=7, from_anchor=True),
    "window from the anchor, causal": Visibility(window=1, from_anchor=True, causal=True),
    "window wider than any context": Visibility(window=200, from_anchor=True),
    "window from the slot": Visibility(window=7),
    "window from the slot, causal": Visibility(window=3, causal=True),
    "window of one": Visibility(window=1, causal=True),
}


def step_of(device):
    """Five requests whose rows lie anywhere, in a table whose last columns some of them reach."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(8 * 30, generator=generator, dtype=torch.int32).view(8, 30) + 1
    return StepRequests(
        anchors=torch.zeros(len(PREFIXES), dtype=torch.int64, device=device),
        prefix_lens=torch.tensor(PREFIXES, device=device),
        req_pool_indices=torch.tensor([6, 0, 3, 5, 1], device=device),
        req_to_token=table.to(device),
    )


def check(form, shown, device, sinks=None):
    """Compare blocks that see what ``shown`` says."""
    requests = step_of(device)
    generator = torch.Generator().manual_seed(1)

    def rand(rows, heads):
        return torch.randn(rows, heads, HEAD_DIM, generator=generator).to(device)

    pool = rand(241, KV_HEADS), rand(241, KV_HEADS)
    for cached in pool:
        cached[0] = torch.nan  # the slot of padding
    rows = len(PREFIXES) * ATTENTION_SLOTS
    q, k, v = rand(rows, HEADS), rand(rows, KV_HEADS), rand(rows, KV_HEADS)
    how = {"heads_per_kv": HEADS // KV_HEADS, "dtype": torch.float32, "scale": SCALE}
    found = form(requests, ATTENTION_SLOTS, shown, **how)(q, k, v, pool, sinks)
    for request, prefix in enumerate(PREFIXES):
        own = slice(request * ATTENTION_SLOTS, (request + 1) * ATTENTION_SLOTS)
        places = requests.req_to_token[requests.req_pool_indices[request], :prefix].long()
        keys, values = (torch.cat((cached[places], x[own])) for cached, x in zip(pool, (k, v), strict=True))
        seen = block_mask(shown, prefix, ATTENTION_SLOTS).to(device)
        expected = attend_dense(q[own], keys, values, scale=SCALE, seen=seen, sinks=sinks)
        torch.testing.assert_close(found[own], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("visibility", KINDS.values(), ids=KINDS)
def test_blocks_see_what_their_layer_shows(visibility, kernels):
    """Sinks take their share of every head."""
    form, device = (block_attention.kernel, DEVICE) if kernels else (block_attention.reference, "cpu")
    for sinks in (None, torch.linspace(-1, 4, HEADS, device=device)):
        check(form, visibility, device, sinks)


def test_a_layout_for_kernels_reads_no_length():
    """So that it can be captured: tensors of the device "meta" have no values to be read."""
    how = {"heads_per_kv": HEADS // KV_HEADS, "dtype": torch.float32, "scale": SCALE}
    for visibility in KINDS.values():
        block_attention.kernel(step_of("meta"), ATTENTION_SLOTS, visibility, **how)
    with pytest.raises((RuntimeError, NotImplementedError)):
        block_attention.reference(step_of("meta"), ATTENTION_SLOTS, KINDS["window from the slot"], **how)


WINDOWS = {"sinks": (5, 2), "no sink": (5, 0), "one row": (1, 0), "all of most": (25, 4), "wider than any": (40, 3)}


@pytest.mark.parametrize(("size", "sinks"), WINDOWS.values(), ids=WINDOWS.keys())
def test_a_window_has_the_first_and_the_last_rows(size, sinks):
    requests = step_of("cpu")
    seen = DraftWindow(size, sinks).of(requests)
    for request, prefix in enumerate(PREFIXES):
        rows = requests.req_to_token[requests.req_pool_indices[request], :prefix].tolist()
        expected = rows if prefix <= size + sinks else rows[:sinks] + rows[prefix - size :]
        found = seen.req_to_token[seen.req_pool_indices[request], : seen.prefix_lens[request]].tolist()
        assert found == expected
    assert torch.equal(seen.anchors, requests.anchors)


def test_a_window_reads_no_length_on_the_host():
    DraftWindow(5, 2).of(step_of("meta"))
