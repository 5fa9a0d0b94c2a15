"""Attacks on the real code path: bounds from below that must stay under the claim."""
