"""Configs: what is read, what is refused, and that each refusal is one line that names its key."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspa import configs
from fedspa.errors import ConfigError
from fedspa.runs.config import Config, load, to_toml


def test_the_packaged_quickstart_is_valid_and_private() -> None:
    config = load()
    assert config.private
    assert config.data.name == "digits"


@pytest.mark.parametrize("name", configs.names())
def test_every_config_that_is_shipped_is_valid(name: str) -> None:
    load(configs.find(name))


def test_written_out_and_read_back_it_is_the_same() -> None:
    config = load(None, ["algorithm.compression=0.3", "run.seed=7"])
    assert load(tomllib.loads(to_toml(config))) == config


def test_overrides_take_toml_values_and_bare_words_and_can_unset() -> None:
    config = load(None, ["algorithm.server=momentum", "privacy.epsilon=none", "privacy.noise_multiplier=2"])
    assert config.algorithm.server == "momentum"
    assert config.privacy.epsilon is None
    assert config.privacy.noise_multiplier == 2.0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.compresion=0.1"], ["algorithm.compresion", "allowed", "compression"]),
        (["algorithm.server_options.beta3=0.1"], ["algorithm.server_options.beta3", "allowed", "beta1"]),
        (["data.partition=dirichlet:0"], ["data.partition", "'shards'", "from 1e-06"]),
        (["nonsense.key=1"], ["nonsense", "allowed", "privacy"]),
        (["algorithm.compression=nan"], ["algorithm.compression", "at most 1"]),
        (["privacy.epsilon=inf"], ["privacy.epsilon", "finite"]),
        (["privacy.epsilon=-1"], ["privacy.epsilon", "greater than"]),
        (["privacy.epsilon=0"], ["privacy.epsilon", "greater than"]),
        (["privacy.delta=1"], ["privacy.delta", "less than 1"]),
        (["privacy.clip_value=1e-30"], ["privacy.clip_value", "0.0000000001"]),
        (["algorithm.compression=1.5"], ["algorithm.compression", "at most 1", "list"]),
        (["algorithm.server=sgd"], ["algorithm.server", "'adam'", "'average'", "'momentum'"]),
        (["algorithm.name=fedprox"], ["algorithm.name", "'fedspa'"]),
        (["federation.agents=0"], ["federation.agents", "greater than or equal to 1"]),
        (["federation.per_round=11"], ["federation.per_round", "federation.agents"]),
        (["algorithm.batch=ten"], ["algorithm.batch", "integer"]),
        (["algorithm.batch=true"], ["algorithm.batch", "integer"]),
        (["algorithm.batch=2.5"], ["algorithm.batch", "integer"]),
        (["privacy.noise_multiplier=1"], ["privacy.epsilon", "privacy.noise_multiplier", "both", "exactly one"]),
        (["privacy.epsilon=none"], ["privacy.epsilon", "privacy.noise_multiplier", "neither", "exactly one"]),
        (["privacy.sampling=fixed", "privacy.neighbours=add-remove"], ["privacy.neighbours", "replace-one"]),
        (["privacy.sampling=shuffled"], ["privacy.sampling", "'poisson'", "'fixed'"]),
        (["algorithm.name=dp-fed"], ["algorithm.compression", "dp-fed", "1.0"]),
        (["algorithm.name=fedavg", "algorithm.compression=1", "algorithm.coding=int"], ["algorithm.coding", "f32"]),
        (["algorithm.name=fedavg", "algorithm.compression=1", "run.ledger=l.sqlite"], ["run.ledger", "no ledger"]),
        (["algorithm.name=fedavg", "algorithm.compression=1", "run.policy=p.toml"], ["run.policy", "no policy"]),
        (["compression=0.1"], ["--set", "section.key=value"]),
        (["algorithm.compression"], ["--set", "section.key=value"]),
    ],
)
def test_a_bad_value_gives_one_line_that_names_the_key(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"[algorithm\n")
    with pytest.raises(ConfigError, match="not TOML"):
        load(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        load(broken)
    (tmp_path / "empty.toml").touch()
    with pytest.raises(ConfigError, match="is empty"):
        load(tmp_path / "empty.toml")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_config_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "config.toml"
    path.write_bytes(text)
    with suppress(ConfigError):
        load(path)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


@given(
    st.dictionaries(
        st.sampled_from([*Config.model_fields, "other"]),
        st.dictionaries(st.sampled_from(["name", "agents", "epsilon", "batch", "clip", "seed", "x"]), scalars)
        | scalars,
    )
)
def test_any_mapping_is_a_config_or_a_config_error(values: dict[str, object]) -> None:
    with suppress(ConfigError):
        config = load(values)
        assert load(tomllib.loads(to_toml(config))) == config
