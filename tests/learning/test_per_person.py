"""A person's loss: the mean over the records that count, and nothing of what fills up the rest."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspa.data.dataset import blank_person, grouped
from fedspa.engine.choose import EngineRequest, choose
from fedspa.errors import ConfigError, MixingWarning
from fedspa.examples import Examples, blank, mapped
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import one_example_a_time
from fedspa.learning.tasks import Classification, CustomLoss, PerPerson, Regression, Task
from fedspa.learning.tasks.base import tried
from fedspa.learning.validate import try_gradients

COUNTS = [1, 3, 4]

PERSONS = np.repeat(np.arange(3), COUNTS)


def people(task: Task) -> tuple[Examples, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    y = torch.randn(8) if isinstance(task, Regression) else torch.arange(8) % 3
    return grouped(x, y, PERSONS, 4, np.arange(8, dtype=np.uint64)), x, y


def net(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, width))


def own(module: nn.Module, example: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(module(example[0]), example[1])
    return loss


TASKS = [Classification(3), Classification(3, label_smoothing=0.1), Regression(1), CustomLoss(own)]  # type: ignore[arg-type]


@pytest.mark.parametrize("task", TASKS)
def test_a_gradient_is_the_mean_over_the_persons_own_records(task: Task) -> None:
    module = net(task.width or 3).double()
    examples, x, y = people(task)
    examples = Examples(
        *(mapped(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, t) for t in examples)
    )
    records = FlatModel(module, task)
    theta = records.flatten().double()
    found = FlatModel(module, PerPerson(task)).per_example_gradients(theta, *examples)
    each = records.per_example_gradients(theta, x.double(), y.double() if y.is_floating_point() else y)
    wanted = torch.stack([part.mean(dim=0) for part in each.split(COUNTS)])
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)
    together = FlatModel(module, PerPerson(task)).gradient(theta, *examples)
    assert torch.allclose(together, wanted.mean(dim=0), rtol=1e-12, atol=1e-14)


def test_what_fills_up_a_person_is_never_looked_at() -> None:
    """Not even with a weight of zero: NaN there would be NaN everywhere."""
    examples, _, _ = people(Classification(3))
    assert isinstance(examples.x, dict)
    records = examples.x["records"]
    assert isinstance(records, Tensor)
    spoilt = records.clone()
    for person, count in enumerate(COUNTS):
        spoilt[person, count:] = torch.nan
    model = FlatModel(net(3), PerPerson(Classification(3)))
    theta = model.flatten()
    clean = model.per_example_gradients(theta, *examples)
    assert torch.equal(model.per_example_gradients(theta, {**examples.x, "records": spoilt}, examples.y), clean)
    assert clean.isfinite().all()


def test_a_model_is_tried_on_records() -> None:
    """That is what it takes: a model that mixes them, or fails, is named as it is for records."""
    example_spec, task = blank_person(blank((4,)), 3), PerPerson(Classification(3))
    noisy = nn.Sequential(nn.Linear(4, 3), _Noisy())
    for each in tried(example_spec, task):
        assert not try_gradients(net(3), *each)
        assert try_gradients(noisy, *each)
    with pytest.warns(MixingWarning):
        choose(
            EngineRequest(
                "generic", nn.Sequential(_Centred(), nn.Linear(4, 3)), example_spec, "cpu", 1, False, task=task
            )
        )
    with pytest.raises(ConfigError, match=r"made like \(4,\)"):
        choose(EngineRequest("generic", nn.Linear(5, 3), example_spec, "cpu", 1, False, task=task))


@pytest.mark.filterwarnings("ignore::fedspa.errors.MixingWarning")
def test_a_model_is_tried_on_several_records_of_a_person() -> None:
    """Norms of one's own often keep statistics of a batch, and none of a single record. A record alone would not show
    it, and the next person's gradient would hold what the last one left."""
    module, task = nn.Sequential(_Averaging(), nn.Linear(4, 3)), PerPerson(Classification(3))
    with pytest.raises(ConfigError, match=r"layer '0' \(_Averaging\) keeps something of one example for the next"):
        choose(EngineRequest("generic", module, blank_person(blank((4,)), 2), "cpu", 1, False, task=task))
    assert (
        choose(EngineRequest("generic", module, blank_person(blank((4,)), 1), "cpu", 1, False, task=task)).name
        == "generic"
    )


class _Averaging(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        return x - self.mean


class _Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class _Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape)


# How torch is set while examples are taken: alike for all threads that do, and as before when the last is done.


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
