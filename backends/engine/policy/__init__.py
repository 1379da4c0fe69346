"""Prefill policies: which of the earlier keys the queries of a step read."""

from backends.engine.policy.base import (
    BLOCK_TOKENS,
    Model,
    Place,
    Policy,
    Span,
    causal_blocks,
    dense_spans,
)
from backends.engine.policy.full import FullPolicy
from backends.engine.policy.registry import POLICIES, make_policy, policy_settings

__all__ = [
    "BLOCK_TOKENS",
    "POLICIES",
    "FullPolicy",
    "Model",
    "Place",
    "Policy",
    "Span",
    "causal_blocks",
    "dense_spans",
    "make_policy",
    "policy_settings",
]
