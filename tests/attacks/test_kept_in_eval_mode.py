"""Attack: a model that keeps nothing of a record in training, and something in eval mode, in which agents score.

A trial of gradients does not see it. Without one of scores, what a record adds to a noisy count depended on who was
scored before it: one record could turn the answers of all others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedspa.engine.per_example import Scores
from fedspa.errors import ConfigError
from fedspa.examples import Examples, blank
from fedspa.learning import models
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, Regression, Task
from fedspa.learning.validate import try_gradients, try_scores

LIKE = blank((4,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(4))
        self.first: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if self.training else self.evaluated(x))  # type: ignore[no-any-return]

    def evaluated(self, x: Tensor) -> Tensor:
        return x


class MovingMean(Net):
    def evaluated(self, x: Tensor) -> Tensor:
        self.centre += 0.5 * (x.mean(0) - self.centre)
        return x - self.centre


class FirstSeen(Net):
    def evaluated(self, x: Tensor) -> Tensor:
        self.first = x.clone() if self.first is None else self.first
        return x - self.first


class Worn(Net):
    """Its own weights."""

    def evaluated(self, x: Tensor) -> Tensor:
        self.head.weight.mul_(-1)
        return x


class Shared(Net):
    """Of all copies."""

    seen: list[Tensor] = []  # noqa: RUF012

    def evaluated(self, x: Tensor) -> Tensor:
        self.seen.append(x.clone())
        return x - self.seen[len(self.seen) // 2]


class SharedFirst(Shared):
    """Keeps only the first that it ever sees."""

    def evaluated(self, x: Tensor) -> Tensor:
        self.seen.append(x.clone())
        return x - self.seen[0]


class Drawn(Net):
    def evaluated(self, x: Tensor) -> Tensor:
        return x * float(np.random.randn())  # noqa: NPY002


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    Shared.seen.clear()


@pytest.mark.filterwarnings("ignore::fedspa.MixingWarning")
@pytest.mark.parametrize("make", [MovingMean, FirstSeen, Worn, Shared, Drawn])
def test_what_is_kept_in_eval_mode_is_found_before_anything_is_scored(make: Callable[[], Net]) -> None:
    torch.manual_seed(0)
    net = make()
    try_gradients(net, LIKE, Classification(3))  # in training nothing is kept
    with pytest.raises(ConfigError, match=r"^in eval mode, in which agents score, the module.+ \(\w+\) .+; .+"):
        try_scores(net, LIKE, Classification(3))
    with pytest.raises(ConfigError, match="in eval mode"):
        try_scores(net, Examples(LIKE.x, torch.zeros(1, 3)), Regression(3))
    assert net.training
    assert net.first is None
    assert not net.centre.any()


def scored(model: FlatModel, x: Tensor, y: Tensor) -> Tensor:
    (rows,) = Scores(model, model.flatten()[None]).rows(torch.zeros(1), x, y, None)
    return rows


def test_a_trial_of_scores_comes_before_the_first_record() -> None:
    """What keeps only its first example, outside of the module, has kept a synthetic one: no record moves others."""
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
    x[0] *= 1e6
    model = FlatModel(SharedFirst(), Classification(3))
    try_scores(model.module, LIKE, Classification(3))
    assert torch.equal(scored(model, x[1:], y[1:]), scored(model, x, y)[1:])
    Shared.seen.clear()
    untried = scored(model, x, y)[1:]
    Shared.seen.clear()
    assert not torch.equal(scored(model, x[1:], y[1:]), untried)


@pytest.mark.parametrize("make", [MovingMean, FirstSeen, Worn, Shared])
def test_untried_one_record_would_turn_the_scores_of_others(make: Callable[[], Net]) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)
    x[0] *= 1e6
    found = []
    for start in (0, 1):
        torch.manual_seed(0)
        Shared.seen.clear()
        model = FlatModel(make(), Classification(3))
        found.append(scored(model, x[start:], y[start:])[-39:])
    assert float((found[0] - found[1]).abs().sum()) > 2  # what one record may add is 1


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(2, 3, batch_first=True, dropout=0.3, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(-1, 2, 2))[0][:, -1]  # type: ignore[no-any-return]


class Noisy(Net):
    """Draws from torch's generator, which is the same for every record."""

    def evaluated(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (Net, Classification(3)),
        (Noisy, Classification(3)),
        (Lstm, Classification(3)),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), Classification(3)),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 3)), Classification(3)),
    ],
)
def test_what_keeps_nothing_may_score(make: Callable[[], nn.Module], task: Task) -> None:
    try_scores(make(), LIKE, task)


@pytest.mark.filterwarnings("ignore::fedspa.MixingWarning")
def test_a_site_does_not_score_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pytest.importorskip("fedspa.flower.trainer")
    trainer._TRAINERS.clear()
    for make, most in ((MovingMean, None), (MovingMean, 3), (Net, None), (Net, 3)):
        monkeypatch.setattr(models, "build", lambda *given, make=make, **named: make())
        made = trainer.trainer_for("logistic", LIKE, Classification(3), most, "auto", 1, False)
        theta = made.training.model.flatten()[None]
        if make is Net:
            assert isinstance(made.scores(theta), Scores)
        else:
            with pytest.raises(ConfigError, match="keeps something of one example for the next, in 'centre'"):
                made.scores(theta)
        trainer._TRAINERS.clear()
