"""Cases of one verification, and what their outcome has to be."""

from dataclasses import dataclass, replace

import torch
from dspark_kernels import (
    DraftBlock,
    DraftDistribution,
    RoundKeys,
    SamplingBatch,
    Windows,
    accept,
    accept_ref,
)

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
