"""Promises: a request may name a time per token, and what is behind its own gets more of a step's drafts."""

from sglang_dspark.engine.feature import Feature

FEATURE = Feature(__name__, is_used=lambda args: True, request_keys="keys.PromiseKeys", part="served.Promises.of")
