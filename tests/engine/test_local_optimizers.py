"""Agents' optimisers: torch.optim on the same noisy gradients, in every engine that takes them, and what follows for
the coding of an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import ALGORITHMS, small
from test_per_example import records, smooth_net, task
from torch import Tensor

import fedspa
from fedspa.engine.local import Engine
from fedspa.engine.native import NativeEngine
from fedspa.engine.optimizer import SGD, LocalOptimizer
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.engine.traced import trace_engine
from fedspa.errors import ConfigError
from fedspa.examples import Examples
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan

OPTIMIZERS = [LocalOptimizer("momentum", 0.8), LocalOptimizer("adam"), LocalOptimizer("adam", 0.5, 0.9, 1e-3)]


def engines() -> dict[str, Engine]:
    traced = trace_engine(smooth_net(), Examples(*records(1)), None, 1)
    assert not hasattr(traced, "reason")
    return {"generic": PerExampleEngine(smooth_net()), "reference": float64_reference(smooth_net()), "traced": traced}  # type: ignore[dict-item]


def by_torch(optimizer: LocalOptimizer, rate: float, gradients: list[Tensor]) -> Tensor:
    parameter = torch.nn.Parameter(torch.zeros(len(gradients[0]), dtype=torch.float64))
    betas = (optimizer.beta1, optimizer.beta2)
    theirs: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD([parameter], lr=rate),
        "momentum": lambda: torch.optim.SGD([parameter], lr=rate, momentum=optimizer.beta1),
        "adam": lambda: torch.optim.Adam([parameter], lr=rate, betas=betas, eps=optimizer.kappa),
    }[optimizer.name]()
    for gradient in gradients:
        parameter.grad = gradient.double()
        theirs.step()
    return parameter.detach()


@pytest.mark.parametrize("optimizer", [SGD, *OPTIMIZERS], ids=lambda each: f"{each.name}-{each.beta1}")
@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("name", ["generic", "reference", "traced"])
def test_updates_are_those_of_torch_on_the_same_noisy_gradients(
    monkeypatch: pytest.MonkeyPatch, name: str, private: bool, optimizer: LocalOptimizer
) -> None:
    seen: list[Tensor] = []
    start = LocalOptimizer.start

    def watched(self: LocalOptimizer) -> Callable[[Tensor], Tensor]:
        direction = start(self)

        def noting(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return direction(gradient)

        return noting

    monkeypatch.setattr(LocalOptimizer, "start", watched)
    asked = task(30, private=private, optimizer=optimizer, local_lr=0.01)
    (result,) = engines()[name].train(FlatModel(smooth_net()).flatten(), [asked])
    assert len(seen) == asked.local_steps == 6
    assert seen[0].shape == result.delta.shape == (30,)
    expected = by_torch(optimizer, asked.local_lr * asked.scale, seen)
    assert torch.allclose(result.delta.double(), expected, rtol=1e-4, atol=1e-6)


def test_state_is_fresh_in_each_participation() -> None:
    engine, theta = PerExampleEngine(smooth_net()), FlatModel(smooth_net()).flatten()
    asked = task(optimizer=LocalOptimizer("adam"))
    first, second = (engine.train(theta, [asked])[0].delta for _ in range(2))
    together = [result.delta for result in engine.train(theta, [asked, asked])]
    assert all(torch.equal(first, other) for other in (second, *together))


def test_the_native_engine_takes_plain_steps_only() -> None:
    engine = NativeEngine(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(49, 4)), 1)
    x, y = records(20)
    d = 49 * 4 + 4
    plan = GaussianPlan(d, d, "l2", 0.3, "poisson", 5, 20, 6, 1, 1.0, "add-remove", 1e-3)
    asked = task(x=x, y=y, steps=plan, optimizer=LocalOptimizer("momentum"))
    with pytest.raises(ConfigError, match=r"'native' takes plain gradient steps; use run.engine = 'generic'"):
        engine.train(torch.zeros(d), [asked])


def plan_of(steps: int, noise: float = 1.0) -> GaussianPlan:
    return GaussianPlan(50, 50, "l2", 0.3, "poisson", 5, 2000, steps, 1, noise, "add-remove", 1e-4)


@given(st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 99))
def test_the_noise_of_a_heavy_ball(steps: int, beta: float, seed: int) -> None:
    """What independent noise of each step adds up to, by its coefficients."""
    optimizer, plan = LocalOptimizer("momentum", beta), plan_of(steps)
    direction, entered = optimizer.start(), torch.zeros(steps, dtype=torch.float64)
    for step in range(steps):
        entered = entered + direction(torch.eye(steps, dtype=torch.float64)[step])
    expected = plan.update_noise(0.1, 1.0) / steps**0.5 * float(entered.norm())
    assert optimizer.update_noise(plan, 0.1, 1.0) == pytest.approx(expected)


@given(st.data())
def test_no_honest_update_is_beyond_the_bound(data: st.DataObject) -> None:
    """Adam, on gradients that are made to make its steps long: signs and sizes of any kind."""
    steps = data.draw(st.integers(1, 30))
    beta1, beta2 = data.draw(st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.99, 0.9), (0.5, 0.5)]))
    optimizer, plan = LocalOptimizer("adam", beta1, beta2), plan_of(steps)
    sizes = data.draw(st.lists(st.floats(-1e6, 1e6, width=32), min_size=steps, max_size=steps))
    growing = [1.5**step for step in range(steps)]
    for gradients in (sizes, growing, [0.0] * (steps - 1) + [1.0]):
        direction = optimizer.start()
        moved = sum(float(direction(torch.tensor([each], dtype=torch.float64))) for each in gradients)
        assert abs(0.1 * 2.0 * moved) <= optimizer.update_bound(plan, 0.1, 2.0)


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("coding", ["f32", "int"])
@pytest.mark.parametrize("noise", ["seeded", "exact"])
def test_whole_runs_end_and_no_update_is_refused(tmp_path: Path, name: str, coding: str, noise: str) -> None:
    """The rounding of a coded value counts in the bound, too."""
    sections = small(
        tmp_path / "run",
        algorithm={"local_optimizer": name, "local_steps": 5, "local_lr": 0.01, "coding": coding, "schedule": "cosine"},
        privacy={"noise": noise},
        run={"engine": "auto"},
    )
    summary = fedspa.run(sections, progress=False).summary
    assert summary["rounds"] == 4
    assert summary["engine"] != "native"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"name": "cpsgd"}}, r"local_optimizer is 'adam'; for cpsgd it must be 'sgd'"),
        (
            {
                "algorithm": {"mask": "shared", "local_steps": 1},
                "privacy": {"adversary": "secure-aggregation"},
            },
            r"local_optimizer is 'adam'; under secure aggregation it must be 'sgd': an agent takes one step",
        ),
    ],
)
def test_where_there_are_no_local_steps_it_is_refused(changes: dict[str, Any], message: str) -> None:

    from fedspa.runs.config import load

    sections = {
        name: dict(values)
        for name, values in ALGORITHMS["cpsgd" if "name" in changes["algorithm"] else "fedspa"].items()
    }
    for name, values in changes.items():
        sections.setdefault(name, {}).update(values)
    sections.setdefault("algorithm", {})["local_optimizer"] = "adam"
    sections.setdefault("privacy", {}).setdefault("epsilon", 1.0)
    sections["privacy"].pop("noise_multiplier", None)
    if "name" in changes["algorithm"]:
        del sections["privacy"]["epsilon"]
    with pytest.raises(ConfigError, match=message):
        load(sections)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_auto_falls_back_and_says_why(name: str) -> None:
    from fedspa.engine.choose import EngineRequest, decide

    choice = decide(EngineRequest("auto", smooth_net(), Examples(*records(1)), "cpu", 1, False, optimizer=name))  # type: ignore[arg-type]
    assert choice.engine == "traced"
    assert f"it takes plain gradient steps, and algorithm.local_optimizer is '{name}'" in choice.why
    with pytest.raises(ConfigError, match="takes plain gradient steps"):
        decide(EngineRequest("native", smooth_net(), Examples(*records(1)), "cpu", 1, False, optimizer=name))  # type: ignore[arg-type]
