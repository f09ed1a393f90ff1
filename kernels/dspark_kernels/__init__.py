"""Sampling, verification, attention, recurrence, draft K/V: torch references, and Triton kernels that compute the same.

No serving engine is imported.

A function with kernels is called without regard to the device (``dispatch``); its reference is named ``*_ref``.
"""

from dspark_kernels.acceptance.acceptance import accept
from dspark_kernels.acceptance.acceptance_reference import accept_ref
from dspark_kernels.acceptance.adjustment import Adjustment, AdjustmentTable, adjust, adjust_ref
from dspark_kernels.acceptance.bitmasks import mask_tokens
from dspark_kernels.acceptance.outcome import AcceptResult
from dspark_kernels.acceptance.simulation import (
    QUANTILES,
    SPAN,
    SimulatedDraws,
    simulated_accept,
    simulated_accept_ref,
    simulated_confidence,
    simulated_confidence_ref,
)
from dspark_kernels.attention.blocks import (
    BlockAttention,
    block_attention,
    block_attention_ref,
    block_groups,
    block_windows,
)
from dspark_kernels.attention.held_rows import HeldRows, hold_rows, hold_rows_ref
from dspark_kernels.attention.injection import CommitRows, kv_inject, kv_inject_ref
from dspark_kernels.attention.ragged import ContextGroup, VisibleKeys, attend_groups, group_contexts
from dspark_kernels.attention.rotation import qk_norm_rope, qk_norm_rope_ref
from dspark_kernels.attention.window import (
    PagedWindows,
    is_crowded,
    num_splits,
    widest_window,
    window_attention,
    window_attention_ref,
)
from dspark_kernels.dispatch import Dispatched, kernels_anywhere, on_kernels, runs_kernels
from dspark_kernels.drafting.block_convolution import block_convolution, block_convolution_ref
from dspark_kernels.drafting.candidates import (
    ASKED_ROWS,
    CACHED_ROWS,
    KIND_ROWS,
    LEAST_MATCH,
    MOST_MATCH,
    NUM_ROWS,
    USUAL,
    Candidates,
    ChainRules,
    SecondTexts,
    usual_bounds,
)
from dspark_kernels.drafting.confidence import block_confidence, block_confidence_ref
from dspark_kernels.drafting.draft_distribution import DraftDistribution
from dspark_kernels.drafting.drafted_block import DraftBlock
from dspark_kernels.drafting.heads import (
    ConfidenceWeights,
    DraftHeads,
    DraftVocabulary,
    LatentHead,
    MarkovWalk,
    MarkovWeights,
)
from dspark_kernels.drafting.int8_linear import Int8Weight, Weight, int8_linear, int8_linear_ref, linear
from dspark_kernels.drafting.residual import add_norm, add_norm_ref
from dspark_kernels.drafting.shortlist import competing_columns
from dspark_kernels.drafting.suffix_match import find_chains, suffix_match, suffix_match_ref
from dspark_kernels.drafting.survival import block_survival
from dspark_kernels.drafting.swiglu import silu_mul, silu_mul_ref
from dspark_kernels.drafting.walk import draft_block
from dspark_kernels.drafting.walk_reference import draft_block_ref
from dspark_kernels.hardware import num_processors
from dspark_kernels.planning.plans import plan_staged, plan_top, plan_uniform
from dspark_kernels.planning.plans_reference import FORCED, plan_staged_ref, plan_top_ref, plan_uniform_ref
from dspark_kernels.planning.preparation import PlanNumbers, PreparedStep, StepRequests, prepare, prepare_ref
from dspark_kernels.planning.windows import VerifyRows, Windows
from dspark_kernels.recurrence.causal_conv_rows import (
    causal_conv_rows,
    causal_conv_rows_ref,
    commit_conv_windows,
    commit_conv_windows_ref,
)
from dspark_kernels.recurrence.gated_delta import commit_gated_delta, gated_delta
from dspark_kernels.recurrence.gated_delta_inputs import DeltaGates, DeltaInputs
from dspark_kernels.recurrence.gated_delta_reference import commit_gated_delta_ref, gated_delta_ref
from dspark_kernels.recurrence.rows import ReplayedRows, StateRows
from dspark_kernels.sampling.noise import (
    Purpose,
    RoundKeys,
    exponential,
    exponential_at,
    inverse_cdf,
    philox4x32,
    uniform,
)
from dspark_kernels.sampling.parameters import FilterParams, SamplingBatch
from dspark_kernels.sampling.target_distribution import target_probs
from dspark_kernels.sampling.token_draw import draw, seeded_argmax
from dspark_kernels.training.losses import distribution_loss, distribution_loss_ref
from dspark_kernels.transfers import to_device

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
    "AcceptResult",
    "Adjustment",
    "AdjustmentTable",
    "BlockAttention",
    "Candidates",
    "ChainRules",
    "CommitRows",
    "ConfidenceWeights",
    "ContextGroup",
    "DeltaGates",
    "DeltaInputs",
    "Dispatched",
    "DraftBlock",
    "DraftDistribution",
    "DraftHeads",
    "DraftVocabulary",
    "FilterParams",
    "HeldRows",
    "Int8Weight",
    "LatentHead",
    "MarkovWalk",
    "MarkovWeights",
    "PagedWindows",
    "PlanNumbers",
    "PreparedStep",
    "Purpose",
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
    "accept_ref",
    "add_norm",
    "add_norm_ref",
    "adjust",
    "adjust_ref",
    "attend_groups",
    "block_attention",
    "block_attention_ref",
    "block_confidence",
    "block_confidence_ref",
    "block_convolution",
    "block_convolution_ref",
    "block_groups",
    "block_survival",
    "block_windows",
    "causal_conv_rows",
    "causal_conv_rows_ref",
    "commit_conv_windows",
    "commit_conv_windows_ref",
    "commit_gated_delta",
    "commit_gated_delta_ref",
    "competing_columns",
    "distribution_loss",
    "distribution_loss_ref",
    "draft_block",
    "draft_block_ref",
    "draw",
    "exponential",
    "exponential_at",
    "find_chains",
    "gated_delta",
    "gated_delta_ref",
    "group_contexts",
    "hold_rows",
    "hold_rows_ref",
    "int8_linear",
    "int8_linear_ref",
    "inverse_cdf",
    "is_crowded",
    "kernels_anywhere",
    "kv_inject",
    "kv_inject_ref",
    "linear",
    "mask_tokens",
    "num_processors",
    "num_splits",
    "on_kernels",
    "philox4x32",
    "plan_staged",
    "plan_staged_ref",
    "plan_top",
    "plan_top_ref",
    "plan_uniform",
    "plan_uniform_ref",
    "prepare",
    "prepare_ref",
    "qk_norm_rope",
    "qk_norm_rope_ref",
    "runs_kernels",
    "seeded_argmax",
    "silu_mul",
    "silu_mul_ref",
    "simulated_accept",
    "simulated_accept_ref",
    "simulated_confidence",
    "simulated_confidence_ref",
    "suffix_match",
    "suffix_match_ref",
    "target_probs",
    "to_device",
    "uniform",
    "usual_bounds",
    "widest_window",
    "window_attention",
    "window_attention_ref",
]
