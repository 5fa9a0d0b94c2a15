"""The choice explains itself: one table of models and settings, with the engine, why it, and what would be faster.

Where a row says what would mend it, the mended case is tried: it must get the engine that was promised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from fedspa.data.dataset import blank_person
from fedspa.engine import Unsupported, combine, native, traced
from fedspa.engine.choose import EngineName, EngineRequest, choose, decide
from fedspa.engine.native import library
from fedspa.engine.per_example import PerExampleEngine
from fedspa.errors import ConfigError
from fedspa.examples import Examples, blank
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification, PerPerson, Task
from fedspa.runs.sections import Run

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")

SHAPE = (1, 6, 6)
TRACE = traced.trace_engine
FASTEST = "the fastest that can run this model here"


def chain(*layers: nn.Module, side: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), *layers, nn.Flatten(), nn.Linear(2 * side**2, 3))


def frozen() -> nn.Sequential:
    module = chain()
    module[0].requires_grad_(False)
    return module


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(36, 36)
        self.norm = nn.GroupNorm(2, 36)
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x + self.norm(self.inner(x)))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) if x.sum() > 0 else self.head(-x.flatten(1))


@dataclass(frozen=True)
class Row:
    """`hints` are fragments, one for each hint in order. `mended` is what the first of them asks for, and must bring
    the engine `then`."""

    module: Callable[[], nn.Module]
    engine: EngineName
    why: str
    hints: tuple[str, ...] = ()
    setting: dict[str, Any] = field(default_factory=dict)
    mended: dict[str, Any] | None = None
    then: EngineName = "native"
    gpu: tuple[int, int] | None = None  # its compute capability, where there is one
    triton: bool = True


CUDA = {"device": "cuda"}
ROWS: dict[str, Row] = {
    "plain": Row(chain, "native", FASTEST),
    "GroupNorm": Row(
        lambda: chain(nn.GroupNorm(1, 2)),
        "traced",
        "not native: layer GroupNorm ('1') is not supported by the native engine",
        ("for native: replace GroupNorm ('1') by layers that it knows: Conv2d, Linear, MaxPool2d,",),
        mended={"module": chain},
    ),
    "frozen": Row(
        frozen,
        "traced",
        "the model has frozen parameters ('0.weight', '0.bias')",
        ("for native: train them too",),
        mended={"module": chain},
    ),
    "buffers": Row(
        lambda: chain(nn.BatchNorm2d(2)).eval(),
        "generic",
        "layer BatchNorm2d ('1') is not supported by the native engine; not traced: torch cannot trace",
        ("for native: leave out the buffers '1.running_mean'",),
        mended={"module": chain},
    ),
    "a residual net": Row(
        Residual,
        "traced",
        "not supported by the native engine; 'add' makes the model more than a plain chain",
    ),
    "an if by values": Row(Branching, "generic", "not traced: torch cannot trace this model: it has data-dependent"),
    "exact": Row(
        chain,
        "traced",
        "privacy.noise = 'exact' has no native implementation",
        ("for native: privacy.noise = 'secure'",),
        {"exact": True},
        mended={"exact": False},
    ),
    "weights": Row(
        chain,
        "traced",
        "the task has weights or label smoothing",
        ("for native: leave out task.weights",),
        {"task": Classification(3, weights=(1.0, 2.0, 1.0))},
        mended={"task": Classification(3)},
    ),
    "forced": Row(
        chain,
        "generic",
        "run.engine = 'generic'",
        ("run.engine = 'auto' takes the fastest that can",),
        {"name": "generic"},
        mended={"name": "auto"},
    ),
    "a GPU that is not used": Row(
        chain, "native", FASTEST, ("run.device = 'cuda': a GPU is there",), gpu=(9, 0), mended=CUDA, then="traced"
    ),
    "a GPU that would, for a residual net": Row(
        Residual, "traced", "plain chain", ("not used, and traced can",), gpu=(9, 0), mended=CUDA, then="traced"
    ),
    "a GPU at a site": Row(
        Residual,
        "traced",
        "plain chain",
        ("device in the node-config = 'cuda'",),
        {"isolation": "fixed-slot"},
        gpu=(9, 0),
        mended=CUDA,
        then="traced",
    ),
    "Poisson at a site without max_records": Row(
        Residual,
        "generic",
        "not traced: it takes records together, and under Poisson sampling a site must then state the most",
        ("for traced: set max_records in the node-config",),
        {"isolation": "per-example"},
        mended={"isolation": "fixed-slot"},
        then="traced",
    ),
    "on a GPU, tf32": Row(chain, "traced", FASTEST, (), {**CUDA, "tf32": True}, gpu=(9, 0)),
    "on a GPU, exact": Row(
        chain,
        "traced",
        FASTEST,
        ("traced would be faster: run.tf32 = true",),
        {**CUDA, "exact": True},
        gpu=(9, 0),
    ),
    "without Triton": Row(
        chain,
        "generic",
        "not traced: its kernels need Triton, which is not installed",
        ("for traced: pip install triton",),
        CUDA,
        gpu=(9, 0),
        triton=False,
    ),
    "an if on a GPU": Row(Branching, "generic", "not traced", (), CUDA, gpu=(9, 0)),
}


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Row:
    """With the GPU that it speaks of: but for traces, made here on the CPU, nothing is put on a device before the first
    training, so none is needed."""
    row = ROWS[request.param]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(row.gpu is not None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: row.gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: row.gpu)
    monkeypatch.setattr("fedspa.engine.choose.find_spec", lambda name: object() if row.triton else None)
    monkeypatch.setattr(traced, "trace_engine", on_cpu)
    return row


def on_cpu(module: nn.Module, like: Examples, task: Task | None, threads: int, device: object, **given: Any) -> object:
    return TRACE(module, like, task, threads)


def case(row: Row, **changes: Any) -> tuple[EngineName, dict[str, Any]]:
    """What `decide` and `choose` are asked."""
    asked: dict[str, Any] = {"device": "cpu", "threads": 1, "exact": False, "like": blank(SHAPE)}
    asked |= {"module": row.module, **row.setting, **changes}
    torch.manual_seed(0)
    asked["module"] = asked["module"]()
    return asked.pop("name", "auto"), asked


def test_the_engine_and_why(row: Row) -> None:
    name, asked = case(row)
    choice = decide(EngineRequest(name, **asked))
    assert choice.engine == row.engine
    assert row.why in choice.why
    assert [fragment in hint for fragment, hint in zip(row.hints, choice.hints, strict=True)] == [True] * len(row.hints)
    assert choice.make().name == choice.engine
    # What was passed over is refused in the same words.
    assert (choice.why == FASTEST) == (name == "auto" and not choice.passed)
    for passed, obstacle in choice.passed.items():
        assert f"not {passed}: {obstacle.reason}" in choice.why
        with pytest.raises(ConfigError) as refused:
            choose(EngineRequest(passed, **asked))
        assert obstacle.reason in str(refused.value)
        assert obstacle.fix in str(refused.value)
        assert any(f"for {passed}: {obstacle.fix}" == hint for hint in choice.hints) == bool(obstacle.fix)


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.mended is not None], indirect=True)
def test_what_a_hint_asks_for_brings_the_faster_engine(row: Row) -> None:
    assert row.mended is not None
    name, asked = case(row, **row.mended)
    assert decide(EngineRequest(name, **asked)).engine == row.then


@pytest.mark.parametrize("fits", [True, False])
def test_obstacles_are_asked_for_once(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    """Tracing a large model takes seconds, and runs the user's code. A GPU that is there and not asked for stays as it
    is."""
    asked: list[str] = []

    def supports(*_: object) -> Unsupported:
        asked.append("native")
        return Unsupported("it was asked")

    def trace_engine(*given: Any, **_: object) -> object:
        asked.append(f"traced on {given[4]}")
        return made if fits else Unsupported("it was asked")

    made = PerExampleEngine(chain())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("fedspa.engine.native.supports", supports)
    monkeypatch.setattr("fedspa.engine.choose.find_spec", lambda name: object())
    monkeypatch.setattr(traced, "trace_engine", trace_engine)
    choice = decide(EngineRequest("auto", chain(), blank(SHAPE), "cpu", 1, exact=False))
    assert choice.engine == ("traced" if fits else "generic")
    assert choice.why == "not native: it was asked" + ("" if fits else "; not traced: it was asked")
    assert (choice.make() is made) == fits
    assert asked == ["native", "traced on cpu"]


def test_a_config_can_name_every_engine() -> None:
    assert get_args(Run.model_fields["engine"].annotation) == get_args(EngineName)


def test_auto_works_without_the_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.engine.library, "library", lambda: None)
    assert choose(EngineRequest("auto", chain(), blank(SHAPE), "cpu", 2, exact=False)).name == "traced"
    choice, missing = decide(EngineRequest("auto", chain(), blank(SHAPE), "cpu", 1, exact=False)), library.missing()
    assert "compiled part" in missing.reason
    assert "install" in missing.fix
    assert choice.why == f"not native: {missing.reason}"
    assert choice.hints[0] == f"for native: {missing.fix}"
    with pytest.raises(ConfigError, match=r"run\.engine.*compiled part"):
        choose(EngineRequest("native", chain(), blank(SHAPE), "cpu", 2, exact=False))


def test_an_engine_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: auto, native"):
        choose(EngineRequest("fast", chain(), blank(SHAPE), "cpu", 1, exact=False))  # type: ignore[arg-type]


class RarelyShaken(nn.Module):
    """Draws where a record has a value that none of the trial's has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.layer(x + torch.rand(()) if bool((x == 12.34375).any()) else x)


@pytest.mark.parametrize("name", ["generic", "reference"])
def test_what_is_drawn_for_a_rare_record_is_its_own(name: EngineName) -> None:
    """Whoever else is in the batch, whatever they draw, and where the global generator stands."""
    torch.manual_seed(0)
    made = RarelyShaken()
    engine = choose(EngineRequest(name, made, blank((4,)), "cpu", 1, exact=False))
    assert engine.gives_rows
    assert engine.draws
    theta, x, y = FlatModel(made).flatten(), torch.full((3, 4), 12.34375), torch.zeros(3, dtype=torch.int64)
    seeds = torch.tensor([5, 6, 5])
    rows = torch.cat(list(engine.rows(theta, (x, seeds), y, None)))
    before = torch.get_rng_state()
    torch.rand(7)
    alone = torch.cat(list(engine.rows(theta, (x[2:], seeds[2:]), y[2:], None)))
    assert torch.equal(rows[2:], alone)
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(before, torch.get_rng_state())  # moved by torch.rand above, and by nothing else
    torch.set_rng_state(before)
    list(engine.rows(theta, (x, seeds), y, None))
    assert torch.equal(before, torch.get_rng_state())


def test_persons_have_the_obstacles_of_their_records() -> None:
    task = PerPerson(Classification(3, label_smoothing=0.1))
    choice = decide(
        EngineRequest(
            "auto",
            nn.Sequential(chain(), nn.LayerNorm(3)),
            blank_person(blank(SHAPE), 65),
            "cpu",
            1,
            exact=False,
            task=task,
        )
    )
    too_many = "it takes up to 64 records of a person, and data.person_records is higher"
    assert choice.passed["native"].reason.startswith(f"{too_many}; it learns classes by plain cross-entropy")
    assert "layer LayerNorm" in choice.passed["native"].reason
    assert choice.passed["traced"] == Unsupported(too_many, "data.person_records = 64, or less")


def test_several_obstacles_are_mended_together_or_not_at_all() -> None:
    first, second, last = Unsupported("a", "do A"), Unsupported("b", "do B"), Unsupported("c")
    assert combine([first, second]) == Unsupported("a; b", "do A; do B")
    assert combine([first, last]) == Unsupported("a; c", "")
