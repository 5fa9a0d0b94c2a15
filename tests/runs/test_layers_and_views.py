"""Masks by layer, features, held-out training records and first values, as a run uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small

import fedspa
from fedspa.errors import ConfigError
from fedspa.learning import models
from fedspa.learning.flat import FlatModel
from fedspa.runs.config import load
from fedspa.runs.records import records_of
from fedspa.runs.setup import prepare

# The mlp on digits has tensors of 4096, 64, 640 and 10 coordinates.
SHARES = [0.0, 1.0, 0.25, 1]
LAYERED: dict[str, Any] = {"mask": "fixed", "compression": SHARES, "server": "average"}


def test_only_the_chosen_share_of_each_layer_is_ever_trained(tmp_path: Path) -> None:
    config = small(tmp_path / "run", model={"name": "mlp"}, algorithm=LAYERED)
    result = fedspa.run(config)
    assert result.summary["compression"] == (64 + 160 + 10) / 4810
    before = FlatModel(models.build("mlp", (1, 8, 8), 10, seed=0)).flatten()
    moved = (FlatModel(result.module).flatten() != before).split([4096, 64, 640, 10])
    assert [int(part.sum()) for part in moved] == [0, 64, 160, 10]


def test_the_plan_knows_how_many_coordinates_are_active(tmp_path: Path) -> None:
    job = prepare(load(small(tmp_path / "run", model={"name": "mlp"}, algorithm=LAYERED)))
    assert job.plan is not None
    assert job.plan.active == 234
    assert job.server.terms.layers == ((4096, 0), (64, 64), (640, 160), (10, 10))


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"compression": [1.0, 1.0]}, ["compression", "4096, 64, 640, 10"]),
        ({"compression": [0.0, 0.0, 0.0, 0.0]}, ["compression", "no active coordinate"]),
        ({"compression": [1.5, 0, 0, 0]}, ["compression", "from 0 to 1"]),
        ({"mask": "per-agent"}, ["compression", "'fixed'"]),
        ({"mask": "shared"}, ["compression", "'fixed'"]),
        ({"name": "dp-fed"}, ["compression", "every coordinate"]),
    ],
)
def test_shares_that_do_not_fit_are_refused(tmp_path: Path, algorithm: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(load(small(tmp_path / "run", model={"name": "mlp"}, algorithm={**LAYERED, **algorithm})))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_a_run_on_features_judges_itself_by_held_out_training_records(tmp_path: Path) -> None:
    config = load(small(tmp_path / "run", data={"features": "orientations", "holdout": 0.2}))
    plain, seen = records_of(load(small(tmp_path / "run"))), records_of(config)
    assert len(seen.test_y) == round(0.2 * len(plain.train_y))
    assert len(seen.train_y) + len(seen.test_y) == len(plain.train_y)
    assert seen.input_shape == (32,)  # 8 directions on a grid of 2 by 2
    result = fedspa.run(config)
    assert result.summary["dimension"] == 330
    assert result.summary["accuracy_last"] * len(seen.test_y) == pytest.approx(
        round(result.summary["accuracy_last"] * len(seen.test_y)), abs=1e-6
    )


def test_given_data_are_seen_through_the_same_features(tmp_path: Path) -> None:
    plain = records_of(load(small(tmp_path / "none")))
    section = {"features": "orientations", "holdout": 0.2}
    own = fedspa.run(small(tmp_path / "a", data=section), data=plain)
    named = fedspa.run(small(tmp_path / "b", data=section))
    assert torch.equal(FlatModel(own.module).flatten(), FlatModel(named.module).flatten())


def test_exact_noise_has_features_made_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()
    real = torch.split

    def split(x: torch.Tensor, size: int, *rest: Any, **more: Any) -> Any:
        sizes.add(size)
        return real(x, size, *rest, **more)

    monkeypatch.setattr("fedspa.data.features.torch.split", split)
    section = {"data": {"features": "orientations", "holdout": 0.3}}
    records_of(load(small(tmp_path / "run", **section, privacy={"noise": "exact"})))
    assert sizes == {1}
