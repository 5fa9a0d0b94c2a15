"""A class for each token: of the next one (language models), or of each (tagging).

Outputs are (examples, positions, classes). An example's loss is the mean over its own tokens that count, and 0 where
none does: how long an example is must not decide how much it weighs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedspa.errors import ConfigError, DataError
from fedspa.examples import Tree
from fedspa.learning.tasks.base import Baseline, OutputTask
from fedspa.learning.tasks.measures import ClassCounts, Measure, Scores, TokenScores, constant_score


class TokenClassification(OutputTask):
    """Targets are whole numbers, (examples, positions); `ignore_index` where a token does not count."""

    name = "token-classification"
    takes_logits = True
    headline = "token_accuracy"

    def __init__(self, *, ignore_index: int = -100) -> None:
        self.ignored = ignore_index

    def targets(self, y: Tree, what: str) -> Tree:
        if not isinstance(y, Tensor) or y.ndim != 2 or y[:1].numel() == 0 or y.is_floating_point():
            raise DataError(f"{what}: {self.name} needs a row of whole numbers per example, a label for each token")
        y = y.to(torch.int64)
        if bool(((y < 0) & (y != self.ignored)).any()):
            low = int(y[y != self.ignored].min())
            raise DataError(f"{what}: label {low} is below 0, and task.ignore_index is {self.ignored}")
        return y

    def losses(self, found: Tensor, y: Tree) -> Tensor:
        found, y = self.aligned(found, y)
        counts = y != self.ignored
        # A label outside the classes costs the example its gradient, and never a GPU its process.
        place = y.clamp(0, found.shape[-1] - 1)
        loss = found.log_softmax(dim=-1).gather(-1, place.unsqueeze(-1)).squeeze(-1).neg()
        known = torch.ones_like(loss).masked_fill(counts & (y != place), torch.nan)
        loss = (loss * known).masked_fill(~counts, 0)
        return loss.sum(dim=1) / counts.sum(dim=1).clamp(min=1)

    def aligned(self, found: Tensor, y: Tree) -> tuple[Tensor, Tensor]:
        """Outputs, and the label that stands against each."""
        assert isinstance(y, Tensor)
        return found, y

    def require_outputs(self, found: Tensor, y: Tree) -> None:
        assert isinstance(y, Tensor)
        if found.ndim != 3 or found.shape[:2] != y.shape:
            raise ConfigError(
                f"it must give a score per class for each token, shape (batch, {y.shape[1]}, classes): for a batch "
                f"of {len(y)} it gave {tuple(found.shape)}"
            )

    def invalid_targets(self, found: Tensor, y: Tree) -> Tensor | None:
        assert isinstance(y, Tensor)
        return ((y != self.ignored) & ((y < 0) | (y >= found.shape[-1]))).any(dim=1)

    def measure(self) -> Measure:
        return _Counted(self, None)

    @property
    def measured(self) -> tuple[str, ...]:
        return ("token_accuracy", "balanced_accuracy", "f1")

    def baseline(self, y: Tree) -> Baseline | None:
        shares = self._shares(y)
        score = None if shares is None else constant_score(self.headline, shares)
        answer = "the token frequencies" if self.headline == "perplexity" else "the most frequent label"
        return None if score is None else Baseline(answer, score)

    def _shares(self, y: Tree) -> Tensor | None:
        """Return the share of each label among the tokens that count."""
        assert isinstance(y, Tensor)
        _, y = self.aligned(y, y)
        counted = y[y != self.ignored]
        return counted.bincount().double() / len(counted) if len(counted) else None

    @staticmethod
    def answers(found: Tensor) -> Tensor:
        return found.argmax(dim=-1)

    @staticmethod
    def probabilities(found: Tensor) -> Tensor | None:
        return found.softmax(dim=-1)


class NextToken(TokenClassification):
    """Targets lie at the position of their own token, as transformers has them, and are held against the output one
    before. Examples without targets are their own: `input_ids`, where `attention_mask` does not say that it is
    padding."""

    name = "next-token"
    headline = "perplexity"

    def labels(self, x: Tree, y: Tree) -> Tree:
        if not isinstance(y, Tensor) or y.ndim != 2 or y.shape[1] > 0:
            return y
        ids = x.get("input_ids") if isinstance(x, dict) else x
        if not isinstance(ids, Tensor):
            raise DataError("next-token: examples without labels must be `input_ids`, or one tensor of tokens")
        mask = x.get("attention_mask") if isinstance(x, dict) else None
        return ids.masked_fill(mask == 0, self.ignored) if isinstance(mask, Tensor) else ids

    def aligned(self, found: Tensor, y: Tree) -> tuple[Tensor, Tensor]:
        assert isinstance(y, Tensor)
        return found[:, :-1], y[:, 1:]

    def measure(self) -> Measure:
        return _Counted(self, TokenScores())

    @property
    def measured(self) -> tuple[str, ...]:
        return ("perplexity", "token_accuracy")


class _Counted(Measure):
    """Hands the tokens that count to what scores them: by default their classes, which the first outputs number."""

    def __init__(self, task: TokenClassification, scored: Measure | None) -> None:
        self._task, self._scored = task, scored

    def add(self, found: Tensor, y: Tree) -> None:
        found, y = self._task.aligned(found, y)
        counts = y != self._task.ignored
        if self._scored is None:
            self._scored = ClassCounts(found.shape[-1], "token_accuracy", ranked=False)
        self._scored.add(found[counts], y[counts])

    def scores(self) -> Scores:
        assert self._scored is not None
        return self._scored.scores()

    def constant_prediction(self) -> int | None:
        return None if self._scored is None else self._scored.constant_prediction()
