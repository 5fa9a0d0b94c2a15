"""A module cut behind its frozen body is the same function of records and θ, and θ is the same vector."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from frozen_nets import Adapted, Detached, FrozenLast, Residual, Tied, TwoInputs, bert, chain, frozen
from torch import Tensor, nn

from fedspa.engine import native
from fedspa.examples import Examples, Tree, count, leaves, zero_examples
from fedspa.learning import backbone
from fedspa.learning.backbone import Split, split
from fedspa.learning.flat import FlatModel
from fedspa.learning.forward import evaluating
from fedspa.learning.tasks import Classification, CustomLoss, Task

CLASSES = 3


def images() -> Tensor:
    return torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def rows() -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(1))


def texts() -> Tree:
    ids = torch.randint(0, 20, (5, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": (torch.arange(7) <= 1 + torch.arange(5)[:, None]).long()}


def found(module: nn.Module, x: Tree, task: Task | None = None) -> Split | str:
    return split(module, Examples(zero_examples(x), torch.zeros(1, dtype=torch.int64)), task or Classification(CLASSES))


def found_split(module: nn.Module, x: Tree) -> Split:
    made = found(module, x)
    assert isinstance(made, Split), made
    return made


def require_equal(module: nn.Module, made: Split, x: Tree) -> None:
    """Outputs and per-example gradients, at θ and elsewhere, one by one and together."""
    y = torch.arange(count(x)) % CLASSES
    whole, head = FlatModel(module), FlatModel(made.head)
    assert [id(p) for p in module.parameters() if p.requires_grad] == [
        id(p) for p in made.head.parameters() if p.requires_grad
    ]
    theta = whole.flatten()
    assert torch.equal(head.flatten(), theta)
    features = made.features(x)
    for at in (theta, theta + 0.1 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(2))):
        torch.testing.assert_close(head.outputs(at, features), whole.outputs(at, x))
        torch.testing.assert_close(head.per_example_gradients(at, features, y), whole.per_example_gradients(at, x, y))
        torch.testing.assert_close(head.gradient(at, features, y), whole.gradient(at, x, y))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = frozen(nn.Linear(16, 16)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.last(h - h.mean(dim=0))


class Drawn(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x + 0.1 * torch.randn_like(x)))


class Counting(Mixing):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return self.last(self.body(x) * (1 + Counting.calls))


class Scaled(Mixing):
    """Scales what is trained by a number of the record."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x)) * x.abs().max()


CUT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tree]]] = {
    "residual": (Residual, images),
    "tied": (Tied, rows),
    "frozen behind": (FrozenLast, rows),
    "two inputs": (TwoInputs, texts),
    "part of what is trained under no_grad": (lambda: Detached(part=True), rows),
    "in place on the frozen part": (Adapted, rows),
    "a number of the record behind": (Scaled, rows),
    "mixing behind the body": (Mixing, rows),
}


@pytest.mark.parametrize("kind", CUT)
def test_the_split_is_the_whole(kind: str) -> None:
    make, x = CUT[kind]
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    made = found_split(module, x())
    require_equal(module, made, x())
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_dropout_draws_and_ends_the_body() -> None:
    module = Residual(0.5)
    made = found_split(module, images())
    assert any(isinstance(layer, nn.Dropout) for layer in made.head.modules())
    assert not any(isinstance(layer, nn.Dropout) for layer in made.body.modules())
    x, y, model, head = images(), torch.zeros(5, dtype=torch.int64), FlatModel(module), FlatModel(made.head)
    theta = model.flatten()
    torch.manual_seed(3)
    expected = model.gradient(theta, x, y)
    torch.manual_seed(3)
    torch.testing.assert_close(head.gradient(theta, made.features(x), y), expected)


def test_modes_of_the_body_stay_those_of_the_split() -> None:
    module = chain()
    made = found_split(module, images())
    features = made.features(images())
    module.train()  # BatchNorm would take the batch's own statistics
    assert torch.equal(made.features(images()), features)
    assert module[1].training
    with evaluating(module):
        assert isinstance(found(module, images()), Split)


def test_a_head_that_changes_features_in_place_gets_copies() -> None:
    module = Adapted()
    made = found_split(module, rows())
    features = made.features(rows())
    kept = [leaf.clone() for leaf in leaves(features)]
    FlatModel(made.head).outputs(FlatModel(module).flatten(), features)
    assert all(map(torch.equal, kept, leaves(features)))


@pytest.mark.parametrize(("module", "said"), [(Drawn(), "draws"), (Counting(), "what the whole module gives")])
def test_what_cannot_be_taken_out(module: nn.Module, said: str) -> None:
    assert said in str(found(module, rows()))


class TestTransformers:
    pytestmark = pytest.mark.filterwarnings("ignore")

    @pytest.fixture(autouse=True)
    def _transformers(self) -> None:
        pytest.importorskip("transformers", reason="needs pip install transformers")

    def test_a_frozen_encoder(self) -> None:
        module = bert()
        frozen(module.bert)
        made = found_split(module, texts())
        require_equal(module, made, texts())
        assert made.example_spec.shape == (1, 16)  # the pooled output, and no mask
        assert native.supports(made.head, (16,)) is None

    def test_adapters_in_the_last_layer(self) -> None:
        peft = pytest.importorskip("peft", reason="needs pip install peft")
        config = peft.LoraConfig(
            task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"], layers_to_transform=[1]
        )
        module = peft.get_peft_model(bert(), config).eval()
        with torch.no_grad():  # B begins at zero, and would hide A
            for name, parameter in module.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(5))
        made = found_split(module, texts())
        require_equal(module, made, texts())
        assert not any("layer.0." in name for name, _ in made.head.named_parameters())


def test_dropout_in_front_leaves_nothing_and_says_why() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Dropout(0.1), frozen(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 3))
    why = found(module, rows())
    assert isinstance(why, str)
    assert "draws random numbers" in why
    assert isinstance(found(module.eval(), rows()), Split)


def test_all_frozen_but_biases() -> None:
    module = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    assert "nothing comes before" in str(found(module, rows()))


def test_features_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone, "_MOST_BYTES", 1000)
    module = nn.Sequential(nn.Upsample(scale_factor=9), frozen(nn.Conv2d(1, 1, 1)), nn.Conv2d(1, 3, 1), nn.Flatten())
    assert "bytes of a record" in str(found(module, torch.zeros(2, 1, 4, 4)))


def test_hooks_and_tasks_of_ones_own() -> None:
    assert "calls the module itself" in str(found(chain(), images(), CustomLoss(lambda module, example: module)))
    module = chain()
    module[0].register_forward_hook(lambda layer, given, made: made * 2)
    assert "hooks" in str(found(module, images()))


@pytest.mark.parametrize(("inner", "split_"), [(4, False), (512, True)], ids=["little work", "much work"])
def test_wide_features_must_save_work(inner: int, split_: bool) -> None:
    """Of 8,192 features a record of 4 bytes each: a narrow body makes them sooner than they are moved."""
    body = nn.Sequential(nn.Linear(16, inner), nn.Tanh(), nn.Linear(inner, 8192), nn.Tanh())
    module = nn.Sequential(body.requires_grad_(False), nn.Linear(8192, CLASSES))
    made = found(module, rows())
    assert isinstance(made, Split) if split_ else "computed faster than moved" in str(made)
