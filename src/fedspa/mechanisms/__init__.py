"""Mechanisms: what is released, each with its plan, its events and their privacy cost, and its noise.

A mechanism is known by the algorithm that uses it (`fedspa.registry`).
"""

from fedspa.mechanisms.base import Mechanism, Plan, PlanRequest, UnknownKind, event_of

__all__ = ["Mechanism", "Plan", "PlanRequest", "UnknownKind", "event_of"]
