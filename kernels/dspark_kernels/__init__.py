"""The sampling mathematics, free of any serving engine: torch references and Triton kernels that compute the same.

References (``*_ref``, and what has no kernel) run on any device; the CPU path serves with them.
"""

from .accept import Accepted, accept_ref
from .accept_fused import accept, accept_fused
from .adjust import Adjustment, AdjustmentTable, adjust, adjust_ref
from .block_confidence import ConfidenceWeights, block_confidence, block_confidence_ref
from .draft_block import DraftBlock, DraftVocabulary
from .draft_law import DraftLaw
from .kv_inject import CommitRows, kv_inject, kv_inject_ref
from .markov_sample import ConfidenceHead, MarkovHead, markov_sample, markov_sample_ref
from .markov_walk import LatentHead, MarkovWeights, WalkWeights, markov_walk, markov_walk_ref
from .noise import Purpose, RoundKeys, exponential, exponential_at, philox4x32, race_exponential, uniform
from .plan import VerifyRows, plan_lens, plan_top, plan_top_ref, plan_uniform, plan_uniform_ref
from .prepare import PreparedStep, StepRequests, prepare, prepare_ref
from .sampling_params import LawParams, SamplingRows
from .simulated_accept import simulated_accept, simulated_accept_ref
from .target_law import target_probs
from .to_device import to_device
from .token_draw import draw, inverse_cdf, seeded_argmax
from .token_mask import mask_tokens

__all__ = [
    "Accepted",
    "Adjustment",
    "AdjustmentTable",
    "CommitRows",
    "ConfidenceHead",
    "ConfidenceWeights",
    "DraftBlock",
    "DraftLaw",
    "DraftVocabulary",
    "LatentHead",
    "LawParams",
    "MarkovHead",
    "MarkovWeights",
    "PreparedStep",
    "Purpose",
    "RoundKeys",
    "SamplingRows",
    "StepRequests",
    "VerifyRows",
    "WalkWeights",
    "accept",
    "accept_fused",
    "accept_ref",
    "adjust",
    "adjust_ref",
    "block_confidence",
    "block_confidence_ref",
    "draw",
    "exponential",
    "exponential_at",
    "inverse_cdf",
    "kv_inject",
    "kv_inject_ref",
    "markov_sample",
    "markov_sample_ref",
    "markov_walk",
    "markov_walk_ref",
    "mask_tokens",
    "philox4x32",
    "plan_lens",
    "plan_top",
    "plan_top_ref",
    "plan_uniform",
    "plan_uniform_ref",
    "prepare",
    "prepare_ref",
    "race_exponential",
    "seeded_argmax",
    "simulated_accept",
    "simulated_accept_ref",
    "target_probs",
    "to_device",
    "uniform",
]
