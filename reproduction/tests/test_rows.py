"""Tables as data: the two of the paper are complete, and files that are no tables are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_table

from fedspa.data import plugin
from fedspa.errors import ConfigError
from reproduction import rows
from reproduction.sweeping import machine_overrides
from reproduction.theorem1 import published_noise

# Tables 1 and 2 of the paper, read off its page: (algorithm, p) → accuracy, cost, ε.
PRINTED = {
    "mnist": {
        ("fedspa", 0.05): (92.65, 0.0197, 1.0),
        ("fedspa", 0.1): (92.16, 0.0393, 1.0),
        ("fedspa", 0.4): (94.84, 0.1572, 1.0),
        ("fedspa", 1.0): (94.70, 0.3931, 1.0),
        ("cpsgd", 0.4): (87.32, 1.5720, 3.63),
        ("cpsgd", 1.0): (88.48, 3.9310, 2.26),
        ("dp-fed", 1.0): (91.41, 0.3931, 1.0),
        ("fedavg", 1.0): (96.87, 0.3931, None),
    },
    "cifar10": {
        ("fedspa", 0.05): (63.0, None, 1.0),
        ("fedspa", 0.1): (63.28, 2.15, 1.0),
        ("fedspa", 0.4): (64.36, 8.60, 1.0),
        ("fedspa", 1.0): (62.06, 21.50, 1.0),
        ("cpsgd", 0.4): (35.74, 86.02, 258.0),
        ("cpsgd", 1.0): (37.17, 215.04, 39.77),
        ("dp-fed", 1.0): (61.13, 21.50, 1.0),
        ("fedavg", 1.0): (67.16, 21.50, None),
    },
}


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_rows_carry_what_is_printed(name: str) -> None:
    for row in rows.read(rows.find_table(name)).row:
        printed = (row.printed.accuracy, row.printed.cost, row.printed.epsilon)
        if row.printed.diverged:
            assert row.algorithm == "cpsgd"
            assert row.compression in (0.05, 0.1)
            assert printed == (None, None, None)
        elif (row.algorithm == "cpsgd") != (row.adversary == "secure-aggregation"):  # ours: the paper has no such row
            assert printed == (None, None, None)
        else:
            assert printed == PRINTED[name][row.algorithm, row.compression], row.key


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_settings_are_what_they_are_called(name: str) -> None:
    """Published: the paper's noise and clip, not sound. Verified: (1.0, 1e-3) by a sound accountant."""
    path = rows.find_table(name)
    spec = rows.read(path)
    federation = (100, 45 if name == "mnist" else 200, 10)
    for row in spec.row:
        if row.algorithm == "cpsgd" or row.adversary != "local":
            continue
        for setting in rows.TRIAL_KINDS:
            if (trial := row.trials.get(setting)) is None:
                assert row.algorithm == "fedavg" or setting == "tuned"
                continue
            config = rows.trial_config(path, trial, [])
            assert config.algorithm.name == row.algorithm
            assert config.algorithm.compression == row.compression
            if setting != "tuned":
                assert (config.federation.agents, config.federation.rounds, config.federation.per_round) == federation
                assert config.model.name.endswith(f"{name}-cnn") or config.model.name.endswith(f"{name}_cnn")
            if row.algorithm == "fedavg":
                continue
            published = setting == "published"
            assert (config.privacy.epsilon, config.privacy.delta) == (None if published else 1.0, 1e-3)
            if published:
                batch, records, steps, times = (10, 600, 300, 5) if name == "mnist" else (50, 500, 50, 20)
                sizes = {"batch": batch, "records": records, "steps": steps, "participations": times}
                noise = published_noise(1.0, 1e-3, **sizes)
                assert config.privacy.noise_multiplier == pytest.approx(noise, rel=1e-4)
                assert config.privacy.clip_value == (0.0113 if name == "mnist" else 0.0006)  # median_clip.py
                assert (config.algorithm.local_steps, config.algorithm.batch, config.algorithm.local_lr) == (
                    (300, 10, 0.01) if name == "mnist" else (50, 50, 0.1)
                )
    assert plugin.resolve(spec.stand_in, key="stand_in", error=ConfigError)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_rows_run_against_the_adversary_that_they_name(name: str) -> None:
    """cpSGD's of the paper with the protocol, over all agents; Fed-SPA beside them; at (1.0, 1e-3) where sound."""
    path = rows.find_table(name)
    summed = []
    for row in rows.read(path).row:
        for setting, trial in row.trials.items():
            config = rows.trial_config(path, trial, [])
            assert config.privacy.adversary == row.adversary, row.key
            if row.adversary == "local":
                continue
            summed.append(row.algorithm)
            assert (config.privacy.colluders, config.privacy.members) == (0, None)
            assert config.federation.per_round == (100 if row.algorithm == "cpsgd" else 10)
            if setting != "published":
                assert (config.privacy.epsilon, config.privacy.delta) == (1.0, 1e-3)
    assert summed.count("cpsgd") == 5
    assert "fedspa" in summed


def test_rows_can_be_chosen(tmp_path: Path) -> None:
    spec = rows.read(small_table.write(tmp_path))
    assert [row.key for row in rows.select(spec, None)] == ["fedspa-0.2", "dp-fed-1", "fedavg-1"]
    assert [row.key for row in rows.select(spec, "fedavg, fedspa-0.2")] == ["fedspa-0.2", "fedavg-1"]
    (one,) = rows.select(spec, "fedspa-0.2-verified")
    assert [*one.trials] == ["verified"]
    assert [*rows.select(spec, "fedspa-0.2-verified,fedspa")[0].trials] == [*spec.row[0].trials] != ["verified"]
    with pytest.raises(ConfigError, match=r"no row 'fedspa-0.2-never'; .* or a cell of one, as fedspa-0.2-\w+$"):
        rows.select(spec, "fedspa-0.2-never")
    with pytest.raises(ConfigError, match=r"no row 'fedspa-0.3'; allowed: .*fedspa-0.2"):
        rows.select(spec, "fedspa-0.3")
    with pytest.raises(ConfigError, match="empty"):
        rows.select(spec, ",")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = ", "not TOML"),
        ("title = 'x'", "no table: data"),
        (small_table.TABLE + "[[row]]\nalgorithm = 'sgd'\ncompression = 1.0\nprinted = {}\n", "row.3.algorithm"),
        (small_table.TABLE.replace('"dp-fed"', '"fedavg"'), "twice"),
        (small_table.TABLE.replace("[[row]]", "[[line]]"), "row: Field required"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "table.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        rows.read(tmp_path / "table.toml")


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no table"):
        rows.read(rows.find_table(str(tmp_path / "none.toml")))
    with pytest.raises(ConfigError, match=r"no table 'imagenet'; allowed: cifar10, mnist"):
        rows.find_table("imagenet")
    with pytest.raises(ConfigError, match=r"no config 'imagenet'; shipped: .*mnist-best"):
        rows.find_config("imagenet")


def test_every_config_that_a_table_names_is_found() -> None:
    named = set()
    for name in rows.table_names():
        path = rows.find_table(name)
        spec = rows.read(path)
        trials = [trial for row in spec.row for trial in row.trials.values()]
        named |= {rows.config_of(path, file).resolve() for file in (spec.curve, *(trial.config for trial in trials))}
    assert len(named) >= 12
    for path in named:
        assert rows.find_config(path.stem).resolve() == path


def test_a_name_is_ours_and_a_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mnist").touch()
    Path("mine").touch()
    assert rows.find_table("mnist").suffix == ".toml"
    assert rows.find_config("mine") == Path("mine")
    assert rows.find_config("./mnist") == Path("mnist")


def test_the_machine_is_shared_out_among_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert machine_overrides("auto", 1) == ['run.device="cpu"', "run.threads=16"]
    assert machine_overrides("auto", 5) == ['run.device="cpu"', "run.threads=3"]
    assert machine_overrides("auto", 99) == ['run.device="cpu"', "run.threads=1"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert machine_overrides("auto", 1)[0] == 'run.device="cuda"'
    assert machine_overrides("cpu", 1)[0] == 'run.device="cpu"'
