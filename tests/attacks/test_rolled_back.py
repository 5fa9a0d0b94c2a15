"""Attack: ask again for a round, after an old copy of the agent's ledger was put back together with its anchor.

Both files are then whole and fit each other, so the round looked as if it had never been: the agent trained for it
again and sent a second update with other noise, though the first lay in its outbox. Later it refused that run, and took
part in every other one as if nothing had been spent.
"""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import shutil
from dataclasses import replace
from pathlib import Path

import attacked_site

from fedspa.errors import LedgerError
from fedspa.flower import check
from fedspa.flower.client_app import Refusal, answer_round


def test_an_old_ledger_beside_a_newer_outbox(tmp_path: Path) -> None:
    home, theta, asked = tmp_path / "clinic", attacked_site.sure_of_the_others(), attacked_site.question(0.1)
    site, files = attacked_site.target(home, present=True), ("ledger.sqlite", "ledger.sqlite.anchor")
    rounds = [replace(asked, terms=replace(asked.terms, round=t)) for t in range(3)]
    answer_round(site, rounds[0], theta)
    for name in files:
        shutil.copy(home / name, tmp_path)
    answer_round(site, rounds[1], theta)
    for name in files:
        shutil.copy(tmp_path / name, home)
    for again in (*rounds, replace(asked, run="f" * 32)):
        with pytest.raises(Refusal, match="lacks round 1 of run") as caught:
            answer_round(site, again, theta)
        assert caught.value.code == "ledger"
    with pytest.raises(LedgerError, match="lacks round 1 of run"):
        check.check_node(site.node)
