"""Streams of tests: one for each label, and one that says what a test wants it to say."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedspa.randomness.streams import Stream, derive_key


def stream(*labels: str | int) -> Stream:
    return Stream(derive_key(bytes(32), "test", *labels))


class Scripted(Stream):
    """Hands out the given words first, then those of its key."""

    def __init__(self, words: list[int]) -> None:
        super().__init__(derive_key(bytes(32), "scripted"))
        self.words = list(words)

    def uint64(self, n: int) -> NDArray[np.uint64]:
        given, self.words = self.words[:n], self.words[n:]
        return np.concatenate([np.array(given, dtype=np.uint64), super().uint64(n - len(given))])
