"""Batches of draft walks: real heads with random weights, random logits, requests that follow rules in turn."""

import itertools
from dataclasses import replace

import torch
from draft_heads import as_weights, draft_heads
from dspark_kernels import DraftVocabulary, Int8Weight
from literal import Request, batch_of

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
