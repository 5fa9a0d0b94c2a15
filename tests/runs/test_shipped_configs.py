"""The configs that are shipped, each with all its options together, at the size of a test: killed, stopped, resumed."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import pytest
from interruptions import few_pictures, refuse_a_difference

from fedspa import configs
from fedspa.runs.config import Config, load

__all__ = ["few_pictures"]
REPRODUCTION = Path(__file__).parents[2] / "reproduction" / "configs"
EXPERIMENTS = [*map(configs.find, configs.names()), *sorted(REPRODUCTION.glob("*.toml"))]
QUICKSTART = Path(str(resources.files("fedspa.runs").joinpath("quickstart.toml")))


def options(path: Path) -> set[str]:
    return {f"{section}.{key}" for section, values in load(path) for key in values.model_fields_set}


def cover() -> set[str]:
    """Return the names of few configs that together set every option that any of them sets; MNIST's are quicker."""
    left = set[str]().union(*map(options, (QUICKSTART, *EXPERIMENTS)))
    found = set[str]()
    paths = sorted((QUICKSTART, *EXPERIMENTS), key=lambda path: path.stem.startswith("cifar10"))
    while left:
        best = max(paths, key=lambda path: len(options(path) & left))
        found.add(best.stem)
        left -= options(best)
    return found


QUICK = cover()
SIZES = {"federation.agents": 2, "federation.rounds": 3, "algorithm.batch": 20, "algorithm.local_steps": 2}


def smaller(path: Path, out: Path) -> Config:
    """The same options on a few records of the same shape."""
    shipped = load(path)
    sizes: dict[str, Any] = dict(SIZES)
    sums = shipped.algorithm.name != "cpsgd" and shipped.privacy.adversary == "secure-aggregation"
    together = sums or shipped.algorithm.name == "cpsgd"
    sizes["federation.per_round"] = 2 if together else 1
    if together:
        sizes["algorithm.local_steps"] = 1
    if sums:  # one step on all of an agent's records
        sizes |= {"algorithm.batch": 120, "privacy.colluders": min(1, shipped.privacy.colluders)}
    if shipped.data.name in ("mnist", "fashion-mnist", "cifar10"):
        sizes["data.name"] = f"'small_records:{shipped.data.name.removeprefix('fashion-')}'"
    if path == QUICKSTART:  # the only one that is private in earnest; the others can be repeated as they stand
        sizes["privacy.noise"] = "seeded"
    sizes |= {"run.out": f"'{out}'", "run.threads": 1}
    return load(path, [f"{key}={value}" for key, value in sizes.items()])


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.long])
        for path in (QUICKSTART, *EXPERIMENTS)
    ],
)
def test_it_goes_on_to_the_same_bits(tmp_path: Path, path: Path) -> None:
    refuse_a_difference(lambda out: smaller(path, out), tmp_path, Random(path.stem))
