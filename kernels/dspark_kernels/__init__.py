"""Sampling, verification, attention, recurrence, draft K/V: torch references, and Triton kernels that compute the same.

No serving engine is imported.

A function with kernels is called without regard to the device (``dispatch``); ``function.reference`` is its form in
torch.
"""

from dspark_kernels.acceptance.acceptance import accept
from dspark_kernels.acceptance.acceptance_reference import AcceptResult
from dspark_kernels.acceptance.adjustment import Adjustment, AdjustmentTable, adjust, mask_tokens
from dspark_kernels.acceptance.simulation import QUANTILES, SPAN, SimulatedDraws, simulated_accept, simulated_confidence
from dspark_kernels.attention.injection import CommitRows, HeldRows, hold_rows, kv_inject
from dspark_kernels.attention.prompts import PromptWindows, attend_prompts, cut_prompts, fixed_split_for
from dspark_kernels.attention.ragged import AttentionLayout, attend_groups, block_groups
from dspark_kernels.attention.rotation import qk_norm_rope
from dspark_kernels.attention.tiles import VisibleKeys, tile_contexts
from dspark_kernels.attention.window import (
    WINDOW_ROWS,
    PagedWindows,
    is_crowded,
    num_splits,
    widest_window,
    window_attention,
)
from dspark_kernels.dispatch import Dispatched, kernels_anywhere, num_processors, observed, on_kernels, runs_kernels
from dspark_kernels.drafting.confidence import block_confidence, block_survival
from dspark_kernels.drafting.heads import (
    ASKED_ROWS,
    CACHED_ROWS,
    KIND_ROWS,
    LEAST_MATCH,
    MOST_MATCH,
    NUM_ROWS,
    USUAL,
    Candidates,
    ChainRules,
    ConfidenceWeights,
    DraftBlock,
    DraftDistribution,
    DraftHeads,
    DraftVocabulary,
    LatentHead,
    MarkovWalk,
    MarkovWeights,
    SecondTexts,
    usual_bounds,
)
from dspark_kernels.drafting.layers import (
    Int8Weight,
    Weight,
    add_norm,
    block_convolution,
    in_its_dtype,
    int8_linear,
    linear,
    silu_mul,
)
from dspark_kernels.drafting.shortlist import competing_columns
from dspark_kernels.drafting.suffix_match import find_chains, suffix_match
from dspark_kernels.drafting.walk import draft_block
from dspark_kernels.losses import distribution_loss
from dspark_kernels.noise import RoundKeys
from dspark_kernels.plans import FORCED, plan_staged, plan_top, plan_uniform
from dspark_kernels.preparation import PlanNumbers, PreparedStep, StepRequests, VerifyRows, Windows, prepare, to_device
from dspark_kernels.recurrence.causal_conv_rows import ReplayedRows, StateRows, causal_conv_rows, commit_conv_windows
from dspark_kernels.recurrence.gated_delta import DeltaGates, DeltaInputs, commit_gated_delta, gated_delta
from dspark_kernels.sampling import SamplingBatch

__all__ = [
    "ASKED_ROWS",
    "CACHED_ROWS",
    "FORCED",
    "KIND_ROWS",
    "LEAST_MATCH",
    "MOST_MATCH",
    "NUM_ROWS",
    "QUANTILES",
    "SPAN",
    "USUAL",
    "WINDOW_ROWS",
    "AcceptResult",
    "Adjustment",
    "AdjustmentTable",
    "AttentionLayout",
    "Candidates",
    "ChainRules",
    "CommitRows",
    "ConfidenceWeights",
    "DeltaGates",
    "DeltaInputs",
    "Dispatched",
    "DraftBlock",
    "DraftDistribution",
    "DraftHeads",
    "DraftVocabulary",
    "HeldRows",
    "Int8Weight",
    "LatentHead",
    "MarkovWalk",
    "MarkovWeights",
    "PagedWindows",
    "PlanNumbers",
    "PreparedStep",
    "PromptWindows",
    "ReplayedRows",
    "RoundKeys",
    "SamplingBatch",
    "SecondTexts",
    "SimulatedDraws",
    "StateRows",
    "StepRequests",
    "VerifyRows",
    "VisibleKeys",
    "Weight",
    "Windows",
    "accept",
    "add_norm",
    "adjust",
    "attend_groups",
    "attend_prompts",
    "block_confidence",
    "block_convolution",
    "block_groups",
    "block_survival",
    "causal_conv_rows",
    "commit_conv_windows",
    "commit_gated_delta",
    "competing_columns",
    "cut_prompts",
    "distribution_loss",
    "draft_block",
    "find_chains",
    "fixed_split_for",
    "gated_delta",
    "hold_rows",
    "in_its_dtype",
    "int8_linear",
    "is_crowded",
    "kernels_anywhere",
    "kv_inject",
    "linear",
    "mask_tokens",
    "num_processors",
    "num_splits",
    "observed",
    "on_kernels",
    "plan_staged",
    "plan_top",
    "plan_uniform",
    "prepare",
    "qk_norm_rope",
    "runs_kernels",
    "silu_mul",
    "simulated_accept",
    "simulated_confidence",
    "suffix_match",
    "tile_contexts",
    "to_device",
    "usual_bounds",
    "widest_window",
    "window_attention",
]
