"""A task says what is learned: a loss of a module on examples, and how well held-out examples are met.

The guarantee is made of each example's gradient, whatever the loss is. Scores are gathered part by part: what is
counted is exact, and ties count a half.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedspa.errors import ConfigError
from fedspa.examples import Examples, Tree, count, layout, leaves, mapped
from fedspa.learning.forward import outputs, returned

Scores = dict[str, float | None]


class Measure(ABC):
    """What every task's scores are asked for."""

    @abstractmethod
    def add(self, found: Tensor, y: Tree) -> None:
        """Outputs and targets of some more examples."""

    @abstractmethod
    def scores(self) -> Scores:
        """Return the scores by name, the task's headline first; None where the examples do not define one."""

    def by_class(self) -> list[float | None] | None:
        """Accuracy on the examples of each class; None where there are no classes."""
        return None

    def constant_prediction(self) -> int | None:
        """Return the class that is predicted for every example, where it is only one and others were right at times."""
        return None


class NoScores(Measure):
    """No scores beside the loss."""

    def add(self, found: Tensor, y: Tree) -> None: ...

    def scores(self) -> Scores:
        return {}


class ClassCounts(Measure):
    """Right, predicted and actual examples of each class: whole numbers, exact in any order. Of two classes also which
    of two examples is ranked higher."""

    def __init__(self, classes: int, headline: str = "accuracy", *, ranked: bool = True) -> None:
        self._counts = torch.zeros(3, classes, dtype=torch.float64)
        self._headline = headline
        self._margins: list[tuple[Tensor, Tensor]] | None = [] if classes == 2 and ranked else None

    def add(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        predicted = found.argmax(dim=1)
        hit, one = (predicted == y).double(), torch.ones(len(y), dtype=torch.float64, device=y.device)
        self._counts = self._counts.to(y.device)
        for row, labels, values in zip(self._counts, (y, predicted, y), (hit, one, one)):
            row.index_add_(0, labels, values)
        if self._margins is not None:
            self._margins.append((found[:, 1].double() - found[:, 0].double(), y == 1))

    def scores(self) -> Scores:
        right, predicted, actual = self._counts.tolist()
        recalls = [hits / count for hits, count in zip(right, actual) if count]
        scores: Scores = {
            self._headline: sum(right) / sum(actual) if sum(actual) else None,
            "balanced_accuracy": _mean(recalls),
            "f1": _mean([2 * hits / (p + a) for hits, p, a in zip(right, predicted, actual) if p + a]),
        }
        if self._margins is not None:
            scores["auc"] = auc(*(torch.cat(part) for part in zip(*self._margins))) if self._margins else None
        return scores

    def by_class(self) -> list[float | None]:
        right, _, actual = self._counts.tolist()
        return [hits / count if count else None for hits, count in zip(right, actual)]

    def constant_prediction(self) -> int | None:
        _, predicted, actual = self._counts.tolist()
        answers = [label for label, count in enumerate(predicted) if count]
        return answers[0] if len(answers) == 1 and sum(map(bool, actual)) > 1 else None


class LabelScores(Measure):
    """Of labels that each are there or not: ranking and F1, both a mean over labels, and whole rows that are right.

    A label that no example has, or every example, ranks nothing; one that neither is nor is predicted has no F1.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        self._wanted: list[Tensor] = []

    def add(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        self._found.append(found.reshape(len(y), -1))
        self._wanted.append(y.reshape(len(y), -1) == 1)

    def scores(self) -> Scores:
        found, wanted = torch.cat(self._found), torch.cat(self._wanted)
        predicted = found > 0
        ranks = [auc(found[:, label].double(), wanted[:, label]) for label in range(found.shape[1])]
        hits, either = (predicted & wanted).sum(0).tolist(), (predicted.sum(0) + wanted.sum(0)).tolist()
        return {
            "auc": _mean([rank for rank in ranks if rank is not None]),
            "f1": _mean([2 * h / e for h, e in zip(hits, either) if e]),
            "exact_match": float((predicted == wanted).all(dim=1).double().mean()),
        }


class Errors(Measure):
    """Sums from which the mean errors and R² follow, in float64. R² is a mean over the numbers of an example, of those
    that are not always the same. Errors are reported times `scale`."""

    def __init__(self, headline: str = "rmse", scale: float = 1.0) -> None:
        self._headline, self._scale = headline, scale
        self._count, self._absolute = 0, 0.0
        # Of each number: squared errors, its mean, and the squares around that.
        self._squared = self._mean = self._spread = torch.zeros(1, dtype=torch.float64)

    def add(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        wanted, given = (part.reshape(len(y), -1).double().cpu() for part in (y, found))
        error = given - wanted
        self._absolute += float(error.abs().sum())
        mean, count = wanted.mean(dim=0), len(wanted)
        # Merged part by part around the means: a difference of large sums of squares would lose its digits.
        total, apart = self._count + count, mean - self._mean
        self._spread = self._spread + (wanted - mean).square().sum(dim=0) + apart**2 * (self._count * count / total)
        self._mean = self._mean + apart * (count / total)
        self._squared = self._squared + error.square().sum(dim=0)
        self._count = total

    def scores(self) -> Scores:
        numbers = self._count * len(self._squared)
        moving = self._spread > 0
        scores: Scores = {
            "rmse": self._scale * math.sqrt(float(self._squared.sum()) / numbers),
            "mae": self._scale * self._absolute / numbers,
            "r2": float((1 - self._squared[moving] / self._spread[moving]).mean()) if moving.any() else None,
        }
        return {self._headline: scores[self._headline]} | scores


class TokenScores(Measure):
    """Of the tokens that count, all together: a long example has more of them than a short one."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)  # tokens, right ones, and the sum of their losses

    def add(self, found: Tensor, y: Tree) -> None:
        """Add tokens in one row, without the ignored ones."""
        assert isinstance(y, Tensor)
        loss = found.log_softmax(dim=-1).gather(1, y.unsqueeze(1)).double().sum().neg()
        parts = torch.stack([loss.new_tensor(len(y)), (found.argmax(dim=1) == y).double().sum(), loss])
        self._sums = self._sums.to(parts) + parts

    def scores(self) -> Scores:
        count, right, loss = self._sums.tolist()
        return {
            "perplexity": math.exp(loss / count) if count and loss / count < _LARGEST_LOG else None,
            "token_accuracy": right / count if count else None,
        }


_LARGEST_LOG = 60.0  # a perplexity beyond e^60 says no more than none


def auc(scores: Tensor, positive: Tensor) -> float | None:
    """Return the chance that a positive example is ranked above another, ties as a half; None where there is only one
    kind. Ranks are halves of whole numbers, so the sums are exact."""
    if not bool(scores.isfinite().all()):
        return None
    _, place, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (sizes.cumsum(0).double() - (sizes - 1).double() / 2)[place]
    above = int(positive.sum())
    pairs = above * (len(scores) - above)
    return (float(ranks[positive].sum()) - above * (above + 1) / 2) / pairs if pairs else None


def average_precision(scores: Tensor, positive: Tensor) -> float | None:
    """Return the mean over positive examples of the precision at their score, equal scores together; None where there
    is no positive example."""
    if not bool(scores.isfinite().all()) or not bool(positive.any()):
        return None
    _, place, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    hits = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, place, positive.double()).flip(0)
    return float((hits * hits.cumsum(0) / sizes.flip(0).cumsum(0)).sum() / hits.sum())


Rank = Callable[[Tensor, Tensor], float | None]


def mean_rank(rank: Rank, scores: Tensor, positive: Tensor) -> float:
    """Return the mean of `rank` over columns, which are classes or labels; those that have none are left out, and the
    mean of none is NaN."""
    found = [rank(scores[:, column], positive[:, column]) for column in range(scores.shape[1])]
    mean = _mean([value for value in found if value is not None])
    return math.nan if mean is None else mean


def constant_score(name: str, shares: Tensor) -> float | None:
    """Return the best score of an answer that is the same for all examples, where the classes have these shares of
    them; None for a score that it does not know."""
    most, present = float(shares.max()), int((shares > 0).sum())
    entropy = -float(torch.xlogy(shares, shares).sum())
    precision = float(shares[1]) if len(shares) == 2 else 1 / present
    return {
        "accuracy": most,
        "token_accuracy": most,
        "balanced_accuracy": 1 / present,
        "f1": 2 * most / (1 + most) / present,
        "auc": 0.5,
        "average_precision": precision,
        "log_loss": entropy,
        "perplexity": math.exp(entropy),
    }.get(name)


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


Loss = Callable[[nn.Module, Tree], Tensor]
Metric = Callable[[Tensor, Tree], float]  # of all held-out outputs and targets; NaN where they do not define one


class Baseline(NamedTuple):
    """What the best answer that looks at no input scores on the very examples that it was chosen by."""

    answer: str
    score: float


class Task(ABC):
    """What every task answers.

    `loss` is the mean over the examples that it is given; a private step gives it one at a time. It runs inside vmap
    too, so that it may not ask a tensor for its values. `headline` is the score that a run is judged by, and
    `headline_note` says why where it is not the task's usual one and nobody chose it.
    """

    name: str
    headline: str
    headline_note: str = ""
    width: int | None = None  # outputs per example of a model that is built for the task; None: only a user's fits

    def labels(self, x: Tree, y: Tree) -> Tree:
        """Return the targets that came with such examples, or those that the task itself makes of the inputs."""
        return y

    @abstractmethod
    def targets(self, y: Tree, what: str) -> Tree:
        """Targets as the loss takes them, or a DataError that begins with `what`."""

    @abstractmethod
    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor: ...

    @abstractmethod
    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        """Raise a ConfigError where the module cannot learn this from such examples."""

    @abstractmethod
    def measure(self) -> Measure: ...

    @property
    def measured(self) -> tuple[str, ...]:
        """Return the names of the scores that every run of the task has."""
        return (self.headline,)

    def on_request(self) -> Mapping[str, Metric]:
        """Return the scores that a run has only where it is judged by them."""
        return {}

    def fair_headline(self, y: Tree) -> tuple[str, str]:
        """Return the headline for held-out examples with such targets, and a note where it is not the usual one."""
        return self.headline, ""

    def baseline(self, y: Tree) -> Baseline | None:
        """Return the headline without any input, by the targets of held-out examples; None where nobody knows."""
        return None

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        """Return what a module's outputs answer, in the form of the targets: by default, the outputs themselves."""
        return found

    @staticmethod
    def probabilities(found: Tensor) -> Tensor | None:
        """Return the probabilities of classes or labels that a module's outputs stand for; None where they stand for
        none."""
        return None


class OutputTask(Task):
    """A task whose loss is a function of the module's outputs and of the targets. `takes_logits` says that the loss
    makes probabilities of the outputs itself, by a sigmoid or softmax."""

    takes_logits = False

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        return self.mean_loss(outputs(module, x), y)

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.require_outputs(outputs(module, x), y)

    @abstractmethod
    def losses(self, found: Tensor, y: Tree) -> Tensor:
        """Return the loss of each example."""

    def mean_loss(self, found: Tensor, y: Tree) -> Tensor:
        return self.losses(found, y).mean()

    def total_loss(self, found: Tensor, y: Tree) -> Tensor:
        """Return the sum over the examples, in float64."""
        return self.losses(found, y).double().sum()

    @abstractmethod
    def require_outputs(self, found: Tensor, y: Tree) -> None:
        """Raise a ConfigError where such outputs cannot be held against such targets."""

    def invalid_targets(self, found: Tensor, y: Tree) -> Tensor | None:
        """Return a mask of the examples whose targets are outside such outputs; None where every number will do. A GPU
        ends the process over one."""
        return None


class CustomLoss(Task):
    """A loss `function(module, example)` of the user's own, the mean over a batch of examples as they were given: the
    pair (x, y), or the dict with its targets in it. A private step gives it one example at a time.

    `key` is where in a dict the targets lay: "" where there were none, None for pairs. `width` is the number of
    classes that the targets are, if any. `what` names the function in what is said of it."""

    name = "own"
    headline = "loss"

    def __init__(
        self, function: Loss, key: str | None = None, width: int | None = None, what: str = "the task's function"
    ) -> None:
        self.function, self._key, self.width, self.what = function, key, width, what

    def targets(self, y: Tree, what: str) -> Tree:
        return y

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        example: Tree = (x, y)
        if self._key is not None:
            example = {**x, self._key: y} if self._key and isinstance(x, dict) else x
        found = self.function(module, example)
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(
                "its loss must be one number, a tensor with a gradient, as `.mean()` makes of many; for a batch of "
                f"{count(y)}, each {layout(x)}, it gave {got}"
            )
        return found.reshape(())

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.loss(module, x, y)

    def measure(self) -> Measure:
        return NoScores()


class ModuleLoss(CustomLoss):
    """The loss that the module itself returns, as transformers' models do: `module(**example).loss`."""

    name = "module"

    def __init__(self, key: str | None = None) -> None:
        super().__init__(_returned_loss, "labels" if key is None else key)

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        if not isinstance(x, dict):
            raise ConfigError(
                "task 'module' calls it with keywords, so an example must be a dict of tensors; for others "
                "give a function: task=lambda module, example: …"
            )
        super().require_fit(module, x, y)


def _returned_loss(module: nn.Module, example: Tree) -> Tensor:
    found = returned(module, example)
    loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"task 'module' needs a module that returns its loss, as `.loss`; this one gave a {type(found).__name__} "
            "without: name another task"
        )
    return loss


class _Wrapping(Task):
    """A task around another, of which all but the loss is that of the other."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.headline, self.width = task.headline, task.width

    def targets(self, y: Tree, what: str) -> Tree:
        return self.task.targets(y, what)

    def require_fit(self, module: nn.Module, x: Tree, y: Tree) -> None:
        self.loss(module, x, y)

    def measure(self) -> Measure:
        return self.task.measure()


class Drawing(_Wrapping):
    """x is the pair of inputs and seeds. Each example draws from its own seed, whatever was drawn before it. The
    generators are left there: the caller of a loss keeps those that others need."""

    name = "drawing"

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        assert isinstance(x, tuple)
        inputs, seeds = x
        assert isinstance(seeds, Tensor)
        torch.default_generator.manual_seed(int(seeds[0]))
        for device in {leaf.device for leaf in leaves(inputs) if leaf.device.type == "cuda"}:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int(seeds[0]))
        return self.task.loss(module, inputs, y)


def require_seeds(draws: bool, x: Tree) -> None:
    """Raise where an engine whose model may draw is given inputs without seeds. Example by example that would cost each
    its gradient without any error."""
    seeds = x[1] if isinstance(x, tuple) and len(x) == 2 else None
    if draws and not (isinstance(seeds, Tensor) and seeds.dtype == torch.int64 and seeds.ndim == 1):
        raise TypeError("this engine takes x as the pair of inputs and seeds: engine/local.py has `seeded`")


TRIED = 3  # records of a person that a module is tried with together


class PerPerson(_Wrapping):
    """A person's loss is the mean over the records that count, by the task of the records.

    What fills up a person's places is left out before the module sees anything: of a record that is not there, no
    weight of zero would hide a NaN.
    """

    name = "per person"

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> Tensor:
        assert isinstance(x, dict)
        counts = x["count"]
        assert isinstance(counts, Tensor)
        losses = []
        for person, own in enumerate(counts.tolist()):
            records, targets = (mapped(lambda leaf: leaf[person, :own], tree) for tree in (x["records"], y))  # noqa: B023
            losses.append(self.task.loss(module, records, targets))
        return torch.stack(losses).mean()


def tried(example_spec: Examples, task: Task | None) -> list[tuple[Examples, Task | None]]:
    """Return what a module is tried with. Where examples are persons: a record by itself, and some of a person's
    together, of which a module may keep what it keeps of none alone, as norms do that count a batch."""
    if not isinstance(task, PerPerson):
        return [(example_spec, task)]
    assert isinstance(example_spec.x, dict)
    (x, alone_x), (y, alone_y) = (
        (mapped(lambda leaf: leaf[:, :TRIED], tree), mapped(lambda leaf: leaf[:, 0], tree))
        for tree in (example_spec.x["records"], example_spec.y)
    )
    some = Examples({"records": x, "count": example_spec.x["count"]}, y)
    several = next(leaves(y)).shape[1] > 1
    return [(Examples(alone_x, alone_y), task.task), *([(some, task)] if several else [])]
