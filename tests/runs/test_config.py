"""Configs: what is read, what is refused, and that each refusal is one line that names its key."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedspa.errors import ConfigError
from fedspa.runs.config import Config, load, to_toml


def test_overrides_take_toml_values_and_bare_words_and_can_unset() -> None:
    config = load(None, ["algorithm.server=momentum", "privacy.epsilon=none", "privacy.noise_multiplier=2"])
    assert config.algorithm.server == "momentum"
    assert config.privacy.epsilon is None
    assert config.privacy.noise_multiplier == 2.0


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
