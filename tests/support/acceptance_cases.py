"""Holds cases of verifications and of draft walks, what their outcome has to be, and tolerances.

Attention is given in float64, without any shortcut.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from draft_heads import as_weights, draft_heads
from dspark_kernels import (
    DraftBlock,
    DraftDistribution,
    DraftVocabulary,
    Int8Weight,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept,
)
from dspark_kernels.acceptance.acceptance_reference import accept_ref
from literal import Request, batch_of
from reference_decoding import attend_dense

SEED, STEP = 2**63 + 12345, (7 << 32) + 99  # all words of the key and the counter in use


def rows_of(temperatures, device="cpu"):
    bs = len(temperatures)
    return SamplingBatch.from_lists(temperatures, [-1] * bs, [1.0] * bs, [0.0] * bs, [None] * bs, device)


@dataclass
class Case:
    """The arguments of one verification."""

    drafts: torch.Tensor
    verify_lens: torch.Tensor
    logits: torch.Tensor
    indptr: torch.Tensor
    distribution: DraftDistribution | None
    rows: SamplingBatch
    keys: RoundKeys
    copied: torch.Tensor | None = None

    @property
    def given(self):
        """Block, windows, logits and lengths, as verification takes them."""
        block = DraftBlock(self.drafts, distribution=self.distribution, copied=self.copied)
        prefix_lens = torch.arange(len(self.drafts), device=self.drafts.device) * 10
        return block, Windows(self.verify_lens, self.indptr), self.logits, prefix_lens

    def accept(self, **changes):
        case = replace(self, **changes)
        return accept(*case.given, case.rows, case.keys)


def make_case(
    device, temperatures, gamma, vocab_size, *, seed=0, dtype=torch.float32, verify_lens=None, reduced=False, slots=0
):
    """Targets that resemble the proposals, so that drafts are kept to every depth; ``slots`` slots have no request."""
    generator = torch.Generator().manual_seed(seed)
    bs = len(temperatures)
    if verify_lens is None:
        verify_lens = torch.randint(0, gamma + 1, (bs,), generator=generator)
    verify_lens = torch.as_tensor(verify_lens)
    token_ids = torch.arange(vocab_size)
    if reduced:
        token_ids = torch.randperm(vocab_size, generator=generator)[: vocab_size // 2].sort().values
    columns = torch.full((vocab_size,), -1, dtype=torch.int32)
    columns[token_ids] = torch.arange(len(token_ids), dtype=torch.int32)
    scores = torch.randn(bs, gamma, len(token_ids), generator=generator) * 2
    distribution = DraftDistribution(scores, scores.logsumexp(-1), columns if reduced else None)
    probs = distribution.probs()
    drafts = torch.empty(bs, gamma, dtype=torch.int64)
    if gamma:
        drafts = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(bs, gamma)
    target = torch.randn(bs, gamma + 1, vocab_size, generator=generator)
    target[:, :gamma] += probs.clamp_min(1e-9).log()
    target[:, :gamma].scatter_add_(2, drafts[..., None], torch.full((bs, gamma, 1), 0.0 if any(temperatures) else 2.0))
    target *= torch.tensor([temperature or 1.0 for temperature in temperatures])[:, None, None]
    logits = target[torch.arange(gamma + 1) <= verify_lens[:, None]]
    nothing = torch.zeros(slots, dtype=torch.int64)
    lens = torch.cat([verify_lens + 1, nothing])

    def padded(tensor):
        return torch.cat([tensor, tensor.new_zeros(slots, *tensor.shape[1:])])

    distribution = DraftDistribution(
        padded(scores).to(device),
        padded(distribution.log_norms).to(device),
        distribution.columns if distribution.columns is None else columns.to(device),
    )
    rows = rows_of([*temperatures, *[1.0 if any(temperatures) else 0.0] * slots], device)
    keys = RoundKeys(
        SEED,
        STEP,
        (torch.arange(bs + slots) * 7 + 2**31).to(device),
        torch.zeros(bs + slots, dtype=torch.int64, device=device),
    )
    return Case(
        padded(drafts).to(device),
        torch.cat([verify_lens, nothing]).to(device),
        logits.to(dtype).to(device),
        torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(device),
        distribution,
        rows,
        keys,
    )


def assert_same(accepted, expected, requests=slice(None)):
    for name in ("accept_lens", "bonus_tokens", "out_tokens", "new_seq_lens"):
        assert torch.equal(getattr(accepted, name)[requests], getattr(expected, name)[requests]), name


def reference(case):
    return accept_ref(*case.given, case.rows, case.keys)


HIDDEN = 6
GREEDY, MIXED = (Request(0.0),), (Request(0.0), Request(0.8), Request(1.3))


class WalkCase:
    """The arguments of a walk.

    Args:
        rules: of the requests in turn.
        token_ids: what is proposed; None for the whole vocabulary.
        eight_bits: whether W2 is stored in eight bits.
    """

    def __init__(
        self,
        device,
        rules=MIXED[:2],
        *,
        bs=3,
        gamma=3,
        v=150,
        rank=5,
        head_type="vanilla",
        dtype=torch.float32,
        token_ids=None,
        eight_bits=False,
    ):
        generator = torch.Generator().manual_seed(v + bs)
        sizes = {"vocab_size": v, "hidden_size": HIDDEN, "block_size": gamma, "rank": rank, "std": 0.5}
        heads = draft_heads(head_type, **sizes, confidence_with_markov=head_type is not None)
        self.markov, self.confidence = (head if head is None else head.to(device, dtype) for head in heads)
        vocabulary = None if token_ids is None else DraftVocabulary(torch.tensor(token_ids, device=device), v)
        if head_type == "selector":
            self.confidence = None  # the head itself says how sure it is
        shortlist = 4 if head_type == "selector" else None
        self.heads, self.device = as_weights(self.markov, self.confidence, vocabulary, shortlist), device
        if eight_bits and head_type is not None:
            w2 = Int8Weight.of(self.heads.markov.w2)
            self.heads = replace(self.heads, markov=replace(self.heads.markov, w2=w2))
        self.base = (torch.randn(bs, gamma, v, generator=generator) * 2).to(device, dtype)
        if vocabulary is not None:
            self.base = self.base[..., vocabulary.token_ids].contiguous()
        self.hidden = torch.randn(bs, gamma, HIDDEN, generator=generator).to(device, dtype)
        self.anchors = torch.randint(v, (bs,), generator=generator).to(device)
        self.follow(rules)

    def follow(self, rules):
        """Have requests follow other rules."""
        cycled = itertools.islice(itertools.cycle(rules), len(self.anchors))
        self.requests = [replace(rule, key=7 * i, position=11 * i) for i, rule in enumerate(cycled)]
        step = torch.tensor(2**33 + 5, device=self.device)
        self.rows, self.keys = batch_of(self.requests, -(2**40) - 7, step, self.device)

    def run(self, form, **changes):
        given = {"heads": self.heads, "rows": self.rows, "keys": self.keys}
        return form(self.base, self.hidden, self.anchors, **(given | changes))


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MAX_TIPPED = 0.01  # share of 16-bit elements where a float32 difference in the last place may tip a rounding


def assert_equal_but_for_rounding(kernel, reference):
    """Both round to the dtype in the same places, from float32 that may differ in its last bit.

    Triton's interpreter truncates to bfloat16 where a GPU rounds: there only the bound holds and not the share.
    """
    dtype = reference.dtype
    assert kernel.dtype == dtype
    bound = 4 * torch.finfo(dtype).eps * reference.abs().max().item()
    torch.testing.assert_close(kernel, reference, atol=bound, rtol=0.0)
    if dtype == torch.float16 or (dtype == torch.bfloat16 and kernel.is_cuda):
        assert (kernel != reference).float().mean().item() <= MAX_TIPPED


FP32_TOL = {"atol": 2e-6, "rtol": 2e-6}  # sums of at most 200 products of unit-variance numbers


def dense_attention(q, k, v, mask, sinks=None):
    """[m, heads, hd] over [n, kv_heads, hd] in float64; mask [m, n] True where visible, sinks [heads] scores."""
    return attend_dense(q.double(), k.double(), v.double(), scale=q.shape[-1] ** -0.5, seen=mask, sinks=sinks)
