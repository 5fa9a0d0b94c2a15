"""Mechanisms: what is released, each in a room with its plan, its noise and its codec."""
