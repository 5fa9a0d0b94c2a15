"""The rand_k sparsifier S of the paper (Definition 2, Lemma 4): keep k coordinates, scale by d/k or not at all."""

from __future__ import annotations

from typing import Literal

MaskMode = Literal["per-agent", "shared", "fixed"]


def scale(mode: MaskMode, dimension: int, active: int) -> float:
    """What S multiplies the kept coordinates by.

    `per-agent` masks average to the identity over agents and rounds, so d/k makes S unbiased. `shared` (one mask per
    round) and `fixed` (one for the run) do block-coordinate descent: all agents move the same coordinates, and each of
    those moves as far as it would without a mask.
    """
    return dimension / active if mode == "per-agent" else 1.0
