"""Torch references of the sampling mathematics, free of any serving engine.

Every function here runs on any device; the CPU path serves with them.
"""

from .accept import Accepted, accept_ref
from .markov_sample import ConfidenceHead, DraftBlock, DraftVocabulary, MarkovHead, markov_sample_ref
from .noise import Purpose, RoundKeys, exponential, exponential_at, philox4x32, uniform
from .sampling_params import LawParams, SamplingRows
from .target_law import target_probs
from .token_draw import draw, inverse_cdf, seeded_argmax

__all__ = [
    "Accepted",
    "ConfidenceHead",
    "DraftBlock",
    "DraftVocabulary",
    "LawParams",
    "MarkovHead",
    "Purpose",
    "RoundKeys",
    "SamplingRows",
    "accept_ref",
    "draw",
    "exponential",
    "exponential_at",
    "inverse_cdf",
    "markov_sample_ref",
    "philox4x32",
    "seeded_argmax",
    "target_probs",
    "uniform",
]
