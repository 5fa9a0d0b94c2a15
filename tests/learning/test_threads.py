"""How torch is set while examples are taken: alike for all threads that do, and as before when the last is done."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Barrier, Thread

import pytest
import torch

from fedspa.learning.forward import one_example_a_time


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before  # type: ignore[assignment]


@pytest.mark.parametrize("before", [True, False])
def test_one_dnn_is_off_until_the_last_thread_is_done(before: bool) -> None:
    torch.backends.mkldnn.enabled = before  # type: ignore[assignment]
    both, one_left = Barrier(2), Barrier(2)
    seen: list[bool] = []

    def leaves_first() -> None:
        with one_example_a_time():
            both.wait(10)
        one_left.wait(10)

    thread = Thread(target=leaves_first)
    thread.start()
    with one_example_a_time():
        both.wait(10)
        one_left.wait(10)
        seen.append(bool(torch.backends.mkldnn.enabled))
    thread.join()
    assert seen == [False]
    assert torch.backends.mkldnn.enabled == before


def test_it_comes_back_after_an_exception() -> None:
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), one_example_a_time():
            raise error
    assert torch.backends.mkldnn.enabled
