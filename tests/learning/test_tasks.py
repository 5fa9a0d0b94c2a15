"""Tasks: each example's gradient is that of its own loss, by any engine; what the loss cannot take is said first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.engine.traced import TracedEngine
from fedspa.errors import ConfigError, DataError
from fedspa.examples import Examples, Tree, in_float64, moved, taken, zero_examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.models import require_fit, require_known
from fedspa.learning.options import OPTIONS
from fedspa.learning.tasks import (
    Binary,
    Classification,
    CustomLoss,
    ModuleLoss,
    MultiLabel,
    NextToken,
    Regression,
    Task,
    TokenClassification,
)
from fedspa.learning.tasks.base import OutputTask
from fedspa.learning.tasks.named import NAMES, resolve

N, IN, CLASSES, LENGTH = 6, 5, 4, 7


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def dense(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, outputs))


class Tagger(nn.Module):
    """As transformers' models: keywords in, `logits` and, with labels, `loss` out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(CLASSES, 3), nn.Linear(3, CLASSES)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embedding(input_ids)).cumsum(1))
        loss = {} if labels is None else {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}
        return {"logits": logits, **loss}


def tagged() -> tuple[dict[str, Tree], Tensor]:
    """Token sequences of different lengths, one of which counts no token at all."""
    ids, labels = whole(CLASSES, N, LENGTH), whole(CLASSES, N, LENGTH)
    labels[torch.arange(LENGTH) >= torch.tensor([7, 5, 2, 0, 6, 1]).unsqueeze(1)] = -100
    return {"input_ids": ids}, labels


def mean_of_counted(module: nn.Module, x: Tree, y: Tensor, shift: int) -> Tensor:
    """Of one example, in the plainest way."""
    logits = module(**x)["logits"][0]
    places = [place for place in range(shift, LENGTH) if y[0, place] != -100]
    losses = [functional.cross_entropy(logits[place - shift], y[0, place]) for place in places]
    return torch.stack(losses).mean() if losses else 0 * logits.sum()


@dataclass(frozen=True)
class Case:
    """A task, and the loss of one example written down once more."""

    task: Task
    module: nn.Module
    x: Tree
    y: Tensor
    truth: Callable[[nn.Module, Tree, Tensor], Tensor]


WEIGHTS, POSITIVE = (0.5, 1.0, 2.0, 7.0), (3.0, 1.0, 0.25)
CASES = {
    "classification": Case(
        Classification(CLASSES, weights=WEIGHTS, label_smoothing=0.2),
        dense(CLASSES),
        drawn(N, IN),
        whole(CLASSES, N),
        lambda m, x, y: functional.cross_entropy(
            m(x), y, torch.tensor(WEIGHTS, dtype=torch.float64), label_smoothing=0.2, reduction="sum"
        ),
    ),
    "binary": Case(
        Binary(1, weights=(3.0,)),
        dense(1),
        drawn(N, IN),
        whole(2, N).float(),
        lambda m, x, y: -(3 * y * m(x)[0].sigmoid().log() + (1 - y) * (1 - m(x)[0].sigmoid()).log()).sum(),
    ),
    "multi-label": Case(
        MultiLabel(3, weights=POSITIVE),
        dense(3),
        drawn(N, IN),
        whole(2, N, 3).float(),
        lambda m, x, y: (
            -(
                torch.tensor(POSITIVE, dtype=torch.float64) * y * m(x).sigmoid().log()
                + (1 - y) * (1 - m(x).sigmoid()).log()
            ).mean()
        ),
    ),
    "mse": Case(Regression(2), dense(2), drawn(N, IN), drawn(N, 2, seed=3), lambda m, x, y: ((m(x) - y) ** 2).mean()),
    "mae": Case(
        Regression(1, loss="mae"), dense(1), drawn(N, IN), drawn(N, seed=3), lambda m, x, y: (m(x)[0] - y).abs().sum()
    ),
    "huber": Case(
        Regression(2, loss="huber", huber=0.5),
        dense(2),
        drawn(N, IN),
        drawn(N, 2, seed=3),
        lambda m, x, y: functional.huber_loss(m(x), y, delta=0.5),
    ),
    "token-classification": Case(
        TokenClassification(), Tagger(), *tagged(), lambda m, x, y: mean_of_counted(m, x, y, 0)
    ),
    "next-token": Case(NextToken(), Tagger(), *tagged(), lambda m, x, y: mean_of_counted(m, x, y, 1)),
    "module": Case(
        ModuleLoss("labels"),
        Tagger(),
        tagged()[0],
        whole(CLASSES, N, LENGTH),
        lambda m, x, y: functional.cross_entropy(m(**x)["logits"][0], y[0]),
    ),
    "own": Case(
        CustomLoss(lambda module, example: functional.cross_entropy(module(example[0]), example[1]) ** 2),
        dense(CLASSES),
        drawn(N, IN),
        whole(CLASSES, N),
        lambda m, x, y: functional.cross_entropy(m(x), y) ** 2,
    ),
}


def true_gradients(case: Case) -> Tensor:
    """One example after another, in float64, from the loss that the case writes down."""
    rows = []
    module = case.module.double()
    try:
        for place in range(N):
            x, y = (in_float64(taken(tree, slice(place, place + 1))) for tree in (case.x, case.y))
            assert isinstance(y, Tensor)
            parts = torch.autograd.grad(case.truth(module, x, y), list(module.parameters()), materialize_grads=True)
            rows.append(torch.cat([part.reshape(-1) for part in parts]))
    finally:
        case.module.float()
    return torch.stack(rows)


def traced_engine(case: Case) -> TracedEngine:
    return TracedEngine(case.module, Examples(zero_examples(case.x), zero_examples(case.y)), case.task)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_each_example_alone(name: str) -> None:
    case = CASES[name]
    truth = true_gradients(case)
    model = FlatModel(case.module, case.task)
    theta = model.flatten()
    reference = torch.cat(list(float64_reference(case.module, case.task).rows(theta, case.x, case.y, None)))
    assert torch.allclose(reference, truth, rtol=1e-12, atol=1e-14)
    alone = torch.cat(list(PerExampleEngine(case.module, case.task).rows(theta, case.x, case.y, None)))
    traced = torch.cat(list(traced_engine(case).rows(theta, case.x, case.y, None)))
    for rows in (alone, traced):
        assert torch.allclose(rows.double(), truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("module", "own")])
def test_the_loss_of_a_batch_is_the_mean_over_its_examples(name: str) -> None:
    case = CASES[name]
    theta = FlatModel(case.module, case.task).flatten()
    model = FlatModel(case.module, case.task)
    each = [model.mean_loss(theta, *(taken(t, slice(i, i + 1)) for t in (case.x, case.y))) for i in range(N)]
    mean = model.mean_loss(theta, case.x, case.y)
    assert torch.allclose(mean, torch.stack(each).mean(), rtol=1e-5)
    if isinstance(case.task, OutputTask):
        total = case.task.total_loss(model.outputs(theta, case.x), case.y)
        assert total.dtype == torch.float64
        assert float(total) == pytest.approx(N * float(mean), rel=1e-5)


@pytest.mark.parametrize("task", [TokenClassification(), NextToken()])
def test_an_example_without_a_token_that_counts_has_no_gradient(task: Task) -> None:
    x, labels = tagged()
    model = FlatModel(Tagger(), task)
    theta = model.flatten()
    alone = {"input_ids": x["input_ids"][3:4]}
    assert (labels[3] == -100).all()
    assert float(model.mean_loss(theta, alone, labels[3:4])) == 0
    assert not model.gradient(theta, alone, labels[3:4]).any()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("classification", CLASSES),
        ("binary", 2.0),
        ("multi-label", torch.nan),
        ("mse", torch.nan),
        ("token-classification", -1),
        ("next-token", 10**9),
    ],
)
def test_a_target_outside_the_outputs_costs_its_example_the_gradient(name: str, bad: float) -> None:
    """And no other, whether examples go one by one or together as on a GPU; there nothing may be looked up beyond."""
    case = CASES[name]
    y = case.y.clone()
    y[2].fill_(bad) if y.ndim == 1 else y[2, 1:2].fill_(bad)
    model = FlatModel(case.module, case.task)
    theta = model.flatten()
    assert isinstance(case.task, OutputTask)
    invalid = case.task.invalid_targets(model.outputs(theta, case.x), y)
    if name != "mse":
        assert invalid.tolist() == [i == 2 for i in range(N)]
    engines = PerExampleEngine(case.module, case.task), float64_reference(case.module, case.task), traced_engine(case)
    for engine in engines:
        rows = torch.cat(list(engine.rows(theta, case.x, y, None)))
        assert rows.isfinite().all(dim=1).tolist() == [i != 2 for i in range(N)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("module", "own")])
def test_an_invalid_target_does_not_crash_a_gpu_process(name: str) -> None:
    case = CASES[name]
    y = case.y.clone()
    y[2:3] = torch.nan if y.is_floating_point() else 10**6
    module = copy.deepcopy(case.module).cuda()
    theta = FlatModel(module, case.task).flatten()
    x = moved(case.x, "cuda")
    rows = torch.cat(list(PerExampleEngine(module, case.task).rows(theta, x, y.cuda(), None))).cpu()
    good = torch.arange(N) != 2
    assert name == "mae" or not rows[2].isfinite().all()
    assert torch.allclose(rows[good].double(), true_gradients(case)[good], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("task", "y", "said"),
    [
        (Classification(3), torch.tensor([0, 3]), "label 3 is outside 0 … 2"),
        (Classification(3), torch.tensor([0.5, 1.0]), "not whole numbers"),
        (Binary(1), torch.tensor([0, 2]), "a label is 2; binary needs 0 or 1"),
        (MultiLabel(2), torch.tensor([[0.0, 0.5]]), "a label is 0.5"),
        (TokenClassification(), torch.zeros(2, 3), "a row of whole numbers"),
        (TokenClassification(), torch.tensor([[0, -1]]), "label -1 is below 0, and task.ignore_index is -100"),
    ],
)
def test_labels_that_a_loss_cannot_take(task: Task, y: Tree, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        task.targets(y, "data 'mine': train")
    assert str(caught.value).startswith("data 'mine': train: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind",
    [
        torch.bool,
        torch.float32,
    ],
)
def test_labels_of_any_kind_become_what_the_loss_takes(kind: torch.dtype) -> None:
    y = torch.tensor([0, 1, 1]).to(kind)
    assert Binary(1).targets(y, "").tolist() == [0.0, 1.0, 1.0]
    assert Regression().targets(y, "").dtype == torch.float32
    assert Classification(2).targets(y, "").dtype == torch.int64


def test_targets_beyond_the_module_are_found_before_a_run() -> None:
    model = FlatModel(Tagger(), TokenClassification())
    x, y = tagged()
    require_known(model, x, y, "data")
    y[4, 2] = CLASSES
    with pytest.raises(DataError, match="data: the target of record 4 is outside"):
        require_known(model, x, y, "data")


@pytest.mark.parametrize(
    ("task", "module", "x", "y", "said"),
    [
        (
            Classification(3),
            dense(4),
            drawn(2, IN),
            whole(3, 2),
            r"one score per class, shape \(batch, 3\) for the labels 0 to 2.*\(3, 4\)",
        ),
        (NextToken(), dense(4), drawn(2, IN), whole(2, 2, 5), r"for each token, shape \(batch, 5, classes\)"),
        (ModuleLoss(""), Tagger(), {"input_ids": whole(2, 2, 5)}, torch.zeros(2, 0), "returns its loss"),
        (
            CustomLoss(lambda module, example: module(example[0])),
            dense(4),
            drawn(2, IN),
            whole(2, 2),
            "must be one number",
        ),
        (Regression(1), dense(1), whole(2, 2, IN), drawn(2), r"whole numbers are taken for tokens.* give x\.float\(\)"),
        (Regression(1), dense(1).double(), drawn(2, IN), drawn(2), r"records are float32, so give module\.float\(\)"),
    ],
)
def test_a_module_that_does_not_fit_the_task(task: Task, module: nn.Module, x: Tree, y: Tree, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        require_fit(FlatModel(module, task), Examples(x, y), "the module")
    assert str(caught.value).startswith("the task's function" if type(task) is CustomLoss else "the module")
    assert "\n" not in str(caught.value)


class TestNextToken:
    def test_without_labels_the_tokens_are_their_own(self) -> None:
        ids, none = whole(CLASSES, 3, 5), torch.zeros(3, 0)
        assert torch.equal(NextToken().labels(ids, none), ids)
        assert torch.equal(NextToken().labels({"input_ids": ids}, none), ids)
        mask = torch.tensor([[1, 1, 1, 0, 0]] * 3)
        labels = NextToken(ignore_index=-7).labels({"input_ids": ids, "attention_mask": mask}, none)
        assert torch.equal(labels, torch.where(mask == 1, ids, -7))

    def test_it_is_token_classification_of_what_comes_next(self) -> None:
        logits, ids = drawn(3, 5, CLASSES), whole(CLASSES, 3, 5)
        assert NextToken().mean_loss(logits, ids) == TokenClassification().mean_loss(logits[:, :-1], ids[:, 1:])

    def test_a_single_token_has_nothing_to_follow(self) -> None:
        assert float(NextToken().mean_loss(drawn(2, 1, CLASSES), whole(CLASSES, 2, 1))) == 0


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (torch.rand(4), r"not whole numbers.* as in task='regression'$"),
        (
            torch.zeros(4, 6, dtype=torch.int64),
            r"\(6,\) int64.* task='next-token', 'token-classification' or 'multi-label'$",
        ),
        (
            torch.zeros(4, 8, 8, dtype=torch.int64),
            r"\(8, 8\) int64.* a loss of your own: task=lambda module, example: ",
        ),
    ],
)
def test_targets_that_are_no_classes_have_another_task(y: Tensor, said: str) -> None:
    with pytest.raises(DataError, match=said):
        resolve("classification", y, None, None)


def test_names_and_options_are_known_together() -> None:
    assert set(OPTIONS) <= {*NAMES, "statistics"}


def test_weights_must_be_as_many_as_what_they_weigh() -> None:
    for name, y in (("classification", whole(3, 9)), ("binary", whole(2, 9)), ("multi-label", whole(2, 9, 3))):
        with pytest.raises(ConfigError, match=r"task.options.weights has 5 weights"):
            resolve(name, y, 3, None, {"weights": [1.0] * 5})
