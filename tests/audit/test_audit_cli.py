import json
import re

import pytest
from typer.testing import CliRunner

from fedspa.audit.targets import of_config
from fedspa.cli import app
from fedspa.errors import ConfigError


def _audit(*arguments):
    return CliRunner().invoke(app, ["audit", "--noise-mode", "seeded", "--draws", "300", *arguments])


def test_json_of_an_audit_that_holds():
    result = _audit("--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["holds"] is True
    assert 0 < answer["lower_bound"] <= answer["claimed"]
    assert 0.9999 < answer["confidence"] < 1
    assert all(check["holds"] for check in answer["checks"])


def test_a_plant_gives_exit_code_1():
    result = _audit("--plant", "sensitivity", "--neighbours", "replace-one", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["holds"] is False
    assert answer["lower_bound"] > answer["claimed"]


def test_the_table_names_what_failed():
    result = _audit("--plant", "sampling", "--neighbours", "replace-one")
    assert result.exit_code == 1
    verdict, *lines = result.output.splitlines()
    assert re.fullmatch(r"VIOLATED with 'sampling' planted, as it must be: \d of \d+ checks failed\.", verdict)
    assert max(map(len, lines)) <= 80
    assert "sampler: steps" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--clip", "norm"), "--clip is 'norm'; allowed: coordinate, l2"),
        (("--plant", "all"), "--plant is 'all'"),
        (("--plant", "sensitivity", "--neighbours", "add-remove"), "replace-one"),
        (("--plant", "sampling-fixed", "--sampling", "fixed"), "no mistake"),
        (("--config", "x.toml"), "--noise-mode and --config"),
        (("--set", "run.seed=1"), "name a config"),
        (("--noise-mode", "loud"), "--noise-mode is 'loud'; allowed: secure, exact, seeded"),
        (("--engine", "warp"), "--engine is 'warp'; allowed: auto"),
        (("--algorithm", "fedspa", "--config", "x.toml"), "--algorithm and --config"),
    ],
)
def test_bad_flags_say_what_is_allowed(arguments, words):
    result = _audit(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_a_configs_keys_can_be_set(tmp_path):
    """Of a mask by layers too: what is audited is the plan of the run."""
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "mlp"\n[algorithm]\nmask = "fixed"\nlayer_shares = [0, 1, 0.1, 1]\n')
    sets = ["privacy.noise_multiplier=1.5", "privacy.clip_value=0.25", 'run.engine="generic"']
    _, target, setting = of_config(path, sets, {}, 300, 0)
    assert (target.plan.active, target.plan.dimension) == (64 + 64 + 10, 4810)
    assert (target.plan.noise_multiplier, target.plan.clip_value) == (1.5, 0.25)
    assert (setting.engine, setting.draws) == ("generic", 300)
