"""Prefill policies: which of the earlier keys the queries of a step read, and in what pieces."""

from backends.engine.policy.base import Policy, Span
from backends.engine.policy.full import FullPolicy
from backends.engine.policy.registry import POLICIES, policy_name

__all__ = ["POLICIES", "FullPolicy", "Policy", "Span", "policy_name"]
