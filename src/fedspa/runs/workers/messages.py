"""What travels between a crew and its workers, as bytes that both can count."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedspa.examples import Examples


@dataclass(frozen=True, slots=True)
class Made:
    """What a worker is made with: its engine, by the packed call that makes it, where it computes, and where this
    process finds the code of both."""

    engine: bytes
    device: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """An agent in one round."""

    number: int
    mask_seed: bytes
    key: bytes
    exact: bool


@dataclass(frozen=True, slots=True)
class Share:
    """Agents that a worker trains together, by name, and those whose records have gone to another. The records that it
    lacks travel beside it: they are large and are put where a machine's processes find them, on a disk where memory is
    short. Keys are not."""

    turns: dict[str, Turn]
    forget: tuple[str, ...]


Records = dict[str, Examples]  # by agent


@dataclass(frozen=True, slots=True)
class Trained:
    """Payloads by agent, and what was logged on the way: logger, level, text."""

    payloads: dict[str, bytes]
    said: list[tuple[str, int, str]]


def packed(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def answer(function: Callable[[], object]) -> bytes:
    """What `function` returns, or the error that it ends in, which is the caller's to raise."""
    try:
        return packed((True, function()))
    except Exception as error:
        try:
            content = packed((False, error))
            pickle.loads(content)
        except Exception:  # somebody's own type, whose arguments do not make it again
            content = packed((False, RuntimeError(f"{type(error).__name__}: {error}")))
        return content


def answered(content: bytes) -> Any:
    good, value = pickle.loads(content)
    if not good:
        raise value
    return value
