"""What is to be known of an algorithm without running it."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from fedspa.algorithms import ALGORITHMS, chosen
from fedspa.errors import ConfigError, PrivacyError


def test_configs_and_reports_need_no_torch() -> None:
    code = "import sys, fedspa.runs.config, fedspa.report.record as p; p.cap_of; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_is_chosen_by_its_name_and_its_adversary(name: str) -> None:
    local = chosen(name, "local")
    assert local is chosen(name, None) is ALGORITHMS[name]
    assert (local.adversary, local.mean) == ("local", None)
    if local.aggregated is None:
        with pytest.raises(ConfigError, match=f"privacy.adversary is 'secure-aggregation'; {name} is not run"):
            chosen(name, "secure-aggregation")
        return
    summed = chosen(name, "secure-aggregation")
    assert (summed.name, summed.adversary, summed.private) == (name, "secure-aggregation", True)
    for known in (local, summed):
        assert pickle.loads(pickle.dumps(known)) == known


@pytest.mark.parametrize("name", ["fedspa", "dp-fed", "cpsgd"])
def test_a_share_of_a_sum_is_never_encoded_by_itself(name: str) -> None:
    summed = chosen(name, "secure-aggregation")
    for way in (summed.encode, summed.decode):
        with pytest.raises(PrivacyError, match="masked"):
            way(*[None] * 5)  # type: ignore[arg-type]
