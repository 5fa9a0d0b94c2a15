"""Synthetic examples cover what a module accepts: state that only some tokens show is found, and no module is refused
for examples that no record is like."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedspa
from fedspa.engine.choose import EngineRequest, choose
from fedspa.errors import ConfigError, RunWarning
from fedspa.examples import Examples, leaves
from fedspa.learning.agreement import synthetic_examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import is_large
from fedspa.learning.models import require_fit
from fedspa.learning.tasks import Binary, Classification, Regression, Task, TokenClassification

WORDS, LENGTH = 50, 6
SPEC = Examples(torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
TASK = Classification(3)


def ending(last: nn.Module, width: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, width), last)


class Words(nn.Module):
    """A mean of embeddings, scaled by what a subclass makes of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(WORDS, 8), nn.Linear(8, 3)
        self.prepare()

    def prepare(self) -> None:
        pass

    def scale(self, x: Tensor) -> Tensor | float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x).mean(1) * self.scale(x))  # type: ignore[no-any-return]


class RunningMaximum(Words):
    def prepare(self) -> None:
        self.top = 0

    def scale(self, x: Tensor) -> float:
        self.top = max(self.top, int(x.max()))
        return 1 / (1 + self.top)


class HighMaximum(RunningMaximum):
    """Moved by the upper part of the vocabulary only."""

    def prepare(self) -> None:
        self.top = 30


class Vocabulary(Words):
    """Grows by every new token beyond the first few."""

    def prepare(self) -> None:
        self.known: dict[int, int] = {}

    def scale(self, x: Tensor) -> float:
        for token in x.flatten().tolist():
            if token > 1:
                self.known.setdefault(token, len(self.known))
        return 1 / (1 + len(self.known))


class LastToken(Words):
    def prepare(self) -> None:
        self.last_token = 0

    def scale(self, x: Tensor) -> float:
        before, self.last_token = self.last_token, max(0, int(x[0, -1]) - 1)
        return 1 / (1 + before)


class NoIndex(nn.Module):
    """Integers that are numbers, and a running maximum of them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.top = nn.Linear(LENGTH, 3), 5.0

    def forward(self, x: Tensor) -> Tensor:
        self.top = max(self.top, float(x.max()))
        return self.last(x.float() / self.top)  # type: ignore[no-any-return]


class FloatTokens(HighMaximum):
    """Tokens that come as floats."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.long())


KEEPING = (RunningMaximum, HighMaximum, Vocabulary, LastToken, NoIndex, FloatTokens)


@pytest.mark.parametrize("kind", KEEPING)
def test_state_that_only_some_tokens_show_is_refused(kind: Callable[[], nn.Module]) -> None:
    example_spec = Examples(SPEC.x.float(), SPEC.y) if kind is FloatTokens else SPEC
    with pytest.raises(ConfigError, match=r"keeps something of one example|another gradient once others were seen"):
        choose(EngineRequest("auto", kind(), example_spec, "cpu", 1, exact=False, task=TASK))


class Positions(Words):
    """Assigns what it has, as to bring it to the inputs' device, and cannot be traced."""

    def prepare(self) -> None:
        self.positions = torch.randn(LENGTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.positions = self.positions.to(x.device) * 1.0
        if x.sum() < 0:
            raise ValueError
        return self.last((self.words(x) + self.positions).mean(1))  # type: ignore[no-any-return]


class Squeezed(Words):
    """Loses the dimension of a batch of one, as Opacus' example for IMDB does."""


class SqueezedScore(Squeezed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., 0]


class NeedsEnd(Words):
    """As BART's classifiers: refuses a record without the token of an end."""

    def forward(self, x: Tensor) -> Tensor:
        if not bool((x == 2).any(1).all()):
            raise ValueError("each example must have an end")
        return super().forward(x)


def records(targets: Tensor) -> fedspa.Dataset:
    """The last of the 257 held-out records is evaluated as a batch of one."""
    x = torch.randint(3, WORDS, (len(targets), LENGTH), generator=torch.Generator().manual_seed(0))
    x[:, -1] = 2
    return fedspa.from_arrays(x[257:], targets[257:], x[:257], targets[:257], name="tokens")


CONFIG = {
    "federation": {"agents": 2, "per_round": 2, "rounds": 2},
    "privacy": {"epsilon": 2.0, "delta": 1e-3},
    "algorithm": {"compression": 0.5, "batch": 8, "local_steps": 1},
}


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        (Positions, "classification"),
        (SqueezedScore, "binary"),
        (NeedsEnd, "classification"),
    ],
)
def test_what_takes_real_records_runs(kind: Callable[[], nn.Module], task: str, tmp_path: Path) -> None:
    module, classes = kind(), 3 if task == "classification" else 2
    y = torch.arange(400) % classes
    data = records(y.float() if task == "regression" else y)
    result = fedspa.run({**CONFIG, "run": {"out": str(tmp_path / "run")}}, data=data, module=module, task=task)
    assert result.summary["rounds"] == 2
    # Nothing that a trace wraps is left in the module.
    assert all(type(values) is Tensor for values in module.buffers())
    module(records(y).test_x)


class Augmented(Words):
    """As transformers' audio models: masks are drawn by numpy."""

    def prepare(self) -> None:
        self.config = SimpleNamespace(apply_spec_augment=True)

    def scale(self, x: Tensor) -> float:
        return float(np.random.rand()) if self.config.apply_spec_augment else 1.0  # noqa: NPY002


class AugmentedByDefault(Augmented):
    """As transformers' Data2VecAudioModel: its config does not have the switch, which is then on."""

    def prepare(self) -> None:
        self.config = SimpleNamespace()

    def _mask_hidden_states(self) -> bool:
        return getattr(self.config, "apply_spec_augment", True)

    def scale(self, x: Tensor) -> float:
        return float(np.random.rand()) if self._mask_hidden_states() else 1.0  # noqa: NPY002


@pytest.mark.parametrize("kind", [Augmented, AugmentedByDefault])
def test_spec_augment_is_named(kind: type[Augmented]) -> None:
    module = kind()
    with pytest.raises(ConfigError, match=r"numpy\.random.*module\.config\.apply_spec_augment = False"):
        choose(EngineRequest("auto", module, SPEC, "cpu", 1, exact=False, task=TASK))
    module.config.apply_spec_augment = False
    choose(EngineRequest("auto", module, SPEC, "cpu", 1, exact=False, task=TASK))


def test_only_a_module_with_millions_of_parameters_is_given_fewer_examples() -> None:
    """Each example finds other state that a module keeps: what costs little is tried with all of them."""
    like, frozen = Examples(torch.rand(4, 300), torch.arange(4)), nn.Linear(4096, 4097).requires_grad_(False)
    usual = nn.Sequential(nn.Linear(300, 330), nn.ReLU(), nn.Linear(330, 10))
    assert 100_000 < sum(parameter.numel() for parameter in usual.parameters()) < 2**24
    large = nn.Sequential(nn.Linear(300, 10), nn.ReLU())
    large.register_module("unused", frozen)
    every, few = (synthetic_examples(like, module) for module in (usual, large))
    assert (len(every), len(few)) == (7 + 4, 3)
    assert len(synthetic_examples(like, large, every=True)) == 7 + 4
    assert (is_large(usual), is_large(large)) == (False, True)


def test_integers_cover_the_vocabulary_of_each_leaf() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.kinds, self.last = nn.Embedding(WORDS, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

        def forward(self, words: Tensor, kinds: Tensor, mask: Tensor) -> Tensor:
            found = (self.words(words) + self.kinds(kinds)) * mask.unsqueeze(-1)
            return self.last(found.sum(1) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]

    x = {name: torch.zeros(1, 40, dtype=torch.int64) for name in ("words", "kinds", "mask")}
    made = [each.x for each in synthetic_examples(Examples(x, SPEC.y), Two(), TASK)[:7]]
    highest = {name: max(int(each[name].max()) for each in made if isinstance(each, dict)) for name in x}  # type: ignore[arg-type, union-attr]
    assert highest == {"words": WORDS - 1, "kinds": 4, "mask": 1}
    assert all(bool(leaf.any()) for leaf in leaves(made[0]))
    assert all(isinstance(each, dict) and bool(each["mask"].any()) for each in made)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("module", "task", "warned"),
    [
        (ending(nn.Sigmoid(), 1), Binary(1), True),
        (ending(nn.Softmax(-1), 3), Classification(3), True),
        (ending(nn.Identity(), 1), Binary(1), False),
        (ending(nn.LogSoftmax(-1), 3), Classification(3), False),
        (ending(nn.ReLU(), 1), Binary(1), False),
        (ending(nn.Sigmoid(), 1), Regression(1), False),
    ],
)
def test_probabilities_where_the_task_takes_logits(module: nn.Module, task: Task, warned: bool) -> None:
    example_spec = Examples(torch.zeros(1, 4), torch.zeros(1, 1) if not isinstance(task, Classification) else SPEC.y)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        require_fit(FlatModel(module, task), example_spec, "the module")
    said = [str(each.message) for each in heard if issubclass(each.category, RunWarning)]
    assert [f"task {task.name!r} takes logits" in text for text in said] == [True] * warned


def test_one_record_by_itself_is_asked_for_before_a_run() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.words(x).squeeze()  # type: ignore[no-any-return]

    example_spec = Examples(SPEC.x, SPEC.x)
    with pytest.raises(ConfigError, match=r"the module cannot take one record by itself.*\.squeeze\(\)"):
        require_fit(FlatModel(Tagger(), TokenClassification()), example_spec, "the module")
