"""Which engine runs: the fastest that can, or the one that was asked for, or an error that says why not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedspa.engine import native
from fedspa.engine.choose import EngineName, choose, decide
from fedspa.engine.local import Gradients
from fedspa.engine.native import library
from fedspa.errors import ConfigError
from fedspa.examples import blank
from fedspa.learning.flat import FlatModel

PLAIN = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
EXOTIC = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2))


def test_auto_works_without_the_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.engine.library, "library", lambda: None)
    assert choose("auto", PLAIN, blank((1, 2, 2)), "cpu", 2, exact=False).name == "traced"
    choice, missing = decide("auto", PLAIN, blank((1, 2, 2)), "cpu", 1, exact=False), library.missing()
    assert missing is not None
    assert "compiled part" in missing.reason
    assert "install" in missing.fix
    assert choice.why == f"not native: {missing.reason}"
    assert choice.hints[0] == f"for native: {missing.fix}"
    with pytest.raises(ConfigError, match=r"run\.engine.*compiled part"):
        choose("native", PLAIN, blank((1, 2, 2)), "cpu", 2, exact=False)


def test_a_forced_engine_is_taken_or_refused() -> None:
    assert choose("generic", PLAIN, blank((1, 2, 2)), "cpu", 1, exact=False).name == "generic"
    assert choose("reference", PLAIN, blank((1, 2, 2)), "cpu", 1, exact=False).name == "reference"
    with pytest.raises(ConfigError, match=r"run\.engine = 'native'.*"):
        choose("native", EXOTIC, blank((1, 2, 2)), "cpu", 1, exact=False)
    with pytest.raises(ConfigError, match="allowed: auto, native"):
        choose("fast", PLAIN, blank((1, 2, 2)), "cpu", 1, exact=False)  # type: ignore[arg-type]


class Buffered(nn.Module):
    """Each example is seen beside a mean of the earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.5).add_(x.flatten(1).mean(0))
        return self.layer(x.flatten(1) - self.seen)


class Remembering(nn.Module):
    """What was seen is counted in an attribute, which vmap does not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.last = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.last += 1.0
        return self.layer(x.flatten(1) - self.last)


class Shaken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1) + torch.rand(()))


@pytest.mark.parametrize("module", [Buffered, Remembering])
@pytest.mark.parametrize("engine", ["auto", "generic", "reference"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_model_that_keeps_state_is_refused(module: type[nn.Module], engine: EngineName, exact: bool) -> None:
    """One example would be in the next one's gradient, and no clip bounds it."""
    with pytest.raises(ConfigError, match="keeps something of one example for the next"):
        choose(engine, module(), blank((1, 2, 2)), "cpu", 1, exact)


class RarelyShaken(nn.Module):
    """Draws where a record has a value that none of the trial's has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.layer(x + torch.rand(()) if bool((x == 12.34375).any()) else x)


@pytest.mark.parametrize("module", [Shaken, RarelyShaken])
@pytest.mark.parametrize("name", ["generic", "reference"])
def test_what_is_drawn_for_a_record_is_its_own(module: type[nn.Module], name: EngineName) -> None:
    """Whoever else is in the batch, whatever they draw, and where the global generator stands."""
    torch.manual_seed(0)
    made = module()
    engine = choose(name, made, blank((4,)), "cpu", 1, exact=False)
    assert isinstance(engine, Gradients)
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
