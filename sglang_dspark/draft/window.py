"""A bound on the context that a draft network sees, whatever its layers could see."""

from dataclasses import dataclass, replace

import torch
from dspark_kernels import StepRequests


@dataclass(frozen=True)
class DraftWindow:
    """The rows of a context that the drafter sees: the first and the last ones (StreamingLLM, Xiao et al. 2024).

    Attributes:
        size: the last rows.
        sinks: the first rows, on which attention rests that has nothing to look for.
    """

    size: int
    sinks: int

    def of(self, requests: StepRequests) -> StepRequests:
        """Return the same requests with these rows for their contexts. No host sync, safe under graph capture."""
        device, last = requests.anchors.device, requests.req_to_token.shape[1] - 1
        seen = min(self.sinks + self.size, last + 1)
        left_out = (requests.prefix_lens - seen).clamp(min=0)[:, None]
        columns = torch.arange(seen, device=device)
        columns = (columns + left_out * (columns >= self.sinks)).clamp(max=last)
        return replace(
            requests,
            req_to_token=requests.req_to_token[requests.req_pool_indices[:, None], columns],
            req_pool_indices=torch.arange(len(requests), device=device),
            prefix_lens=requests.prefix_lens.clamp(max=seen),
        )
