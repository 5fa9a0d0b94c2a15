"""Attack: subtract the noise of a run whose seed is known, after its files called it private.

Noise was seeded by default, with seed 0, and nobody was told where it mattered: `summary.json` had `"private": true`,
`fedspa ledger show` and `verify` printed ε and "sound", no event said where its noise came from, `fedspa.run` warned
nobody. Whoever guessed the seed had every agent's gradient sums.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export
from fedspa.cli import main
from fedspa.cli.deployment import RoundPrinter
from fedspa.cli.run import show
from fedspa.mechanisms import event_of
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, total
from fedspa.privacy.event import as_server_saw, noise_modes, seeded_warning
from fedspa.running import RunResult
from fedspa.runs.guarantee import describe_guarantee, statement

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
from small_runs import small

EVENT = GaussianEvent("poisson", 10, 600, 30, 2.47)


def run(out: Path, noise: str, **sections: dict[str, Any]) -> RunResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedspa.SeededNoiseWarning)
        return fedspa.run(small(out, **{"privacy": {"noise": noise}, **sections}))


def said(*words: str) -> str:
    """What the command line prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["fedspa", *words])
        patched.setenv("COLUMNS", "400")
        with contextlib.suppress(SystemExit):
            main()
    return out.getvalue()


def test_noise_is_seeded_by_name_only(tmp_path: Path) -> None:
    """Two runs of one seed have other noise, unless it is asked for."""
    assert fedspa.Config.model_validate({"privacy": {"epsilon": 1.0}}).privacy.noise == "secure"
    models = {}
    for name, noise in (("a", None), ("b", None), ("c", "seeded"), ("d", "seeded")):
        config = small(tmp_path / name, privacy={"noise": noise} if noise else {})
        if noise is None:
            del config["privacy"]["noise"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fedspa.SeededNoiseWarning)
            fedspa.run(config)
        models[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert models["a"] != models["b"]
    assert models["c"] == models["d"]


@pytest.mark.parametrize("noise", ["seeded", "secure", "exact"])
def test_every_file_and_every_epsilon_says_where_the_noise_came_from(tmp_path: Path, noise: str) -> None:
    result = run(tmp_path / "run", noise)
    summary, seeded = result.summary, noise == "seeded"
    assert summary["private"] is not seeded
    assert summary["not_private_because"] == ("seeded noise" if seeded else None)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["private"] for line in lines] == [not seeded] * len(lines)
    told = export(tmp_path / "run/ledger.sqlite")
    assert {entry["event"]["noise"] for entry in told["entries"]} == {noise}
    assert told["noise"] == {noise: len(told["entries"])}
    assert ("NOT PRIVATE: THE NOISE WAS SEEDED" in statement(summary)) is seeded
    assert ("Nothing is promised:" in dict(describe_guarantee(summary, 6))) is seeded
    assert ("What would be promised." in dict(describe_guarantee(summary, 6))) is seeded
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # what a server shows of its rounds
        RoundPrinter()(tmp_path / "run")
    assert printed.getvalue().count("SEEDED") == seeded * (len(lines) + 1)


def test_every_line_on_a_screen_with_a_seeded_epsilon_says_so(tmp_path: Path) -> None:
    from rich.console import Console

    result = run(tmp_path / "run", "seeded")
    screen = Console(file=io.StringIO(), width=400)
    show(result, screen)
    ledger = str(tmp_path / "run/ledger.sqlite")
    figure = f"{result.summary['epsilon']:.2f}"[:4]
    outputs = {
        "run": screen.file.getvalue(),  # type: ignore[attr-defined]
        "ledger": said("ledger", "show", ledger),
    }
    assert "ε so far (SEEDED NOISE: not private)" in outputs["run"]
    for name, text in outputs.items():
        lines = [line for line in text.splitlines() if figure in line and not line.strip()[:1].isdigit()]
        assert lines, (name, text)
        assert all("SEEDED" in line for line in lines), (name, lines)
    words = "THE NOISE WAS SEEDED: a simulation, nothing in it is private"
    assert words in outputs["ledger"]
    assert words in said("ledger", "verify", ledger)
    assert json.loads(said("ledger", "verify", ledger, "--json"))["noise"] == {"seeded": 12}
    assert any(words in line for line in json.loads(said("ledger", "show", ledger, "--json"))["warnings"])
    page = (tmp_path / "run/report.html").read_text("utf-8")
    for text in (
        "none: a simulation",
        "Reviewed as A SIMULATION, of which nothing is private",
        "THE NOISE OF THIS RUN",
    ):
        assert text in page


def test_a_secure_run_in_the_ledger_of_a_seeded_one_says_so_of_their_total(tmp_path: Path) -> None:
    """Also where the total is told in a note alone, since the two runs drew their batches in different ways."""
    for relation in ({}, {"sampling": "fixed", "neighbours": "replace-one"}):
        folder = tmp_path / (relation.get("sampling", "poisson"))
        folder.mkdir()
        shared = {"ledger": str(folder / "shared.sqlite")}
        run(folder / "a", "seeded", run=shared, privacy={"noise": "seeded", **relation})
        summary = run(folder / "b", "secure", run=shared).summary
        notes = [warning for warning in summary["warnings"] if "under replace-one it is" in warning]
        assert bool(notes) is bool(relation)
        told = notes[0] if notes else summary["accountant_total"]
        assert "PARTICIPATIONS WAS SEEDED" in told


def test_a_budget_that_is_refused_says_so_beside_its_epsilon(tmp_path: Path) -> None:
    seeded, cap = replace(EVENT, noise="seeded"), PrivacyBudget(0.1, 1e-5, "add-remove")
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(fedspa.FedspaError, match="THE NOISE WAS SEEDED"):
            ledger.reserve("a", seeded, "run", "0", cap=cap)
        ledger.reserve("a", seeded, "run", "0")
        with pytest.raises(fedspa.FedspaError, match="THE NOISE OF 1 OF 2 PARTICIPATIONS WAS SEEDED"):
            ledger.reserve("a", replace(EVENT, noise="secure"), "run", "1", cap=cap)
        with pytest.raises(fedspa.FedspaError, match=r"rdp filter|pld") as refused:
            ledger.reserve("b", replace(EVENT, noise="secure"), "run", "1", cap=cap)
        assert "SEEDED" not in str(refused.value)
    policy = tmp_path / "policy.toml"
    policy.write_text(
        'epsilon = 0.01\ndelta = 1e-3\nneighbours = "add-remove"\nmin_noise_multiplier = 0.01\nmax_local_steps = 100\n'
        'max_rounds = 100\nmax_compression = 1.0\nclippings = ["coordinate", "l2"]\n'
    )
    shared = tmp_path / "shared.sqlite"
    Ledger.open(shared).close()
    for noise, ledger_key in (("seeded", {}), ("seeded", {"ledger": str(shared)}), ("secure", {})):
        with pytest.raises(fedspa.FedspaError, match=r"0\.01.*participations|0\.01.*rounds") as refused:
            run(tmp_path / "run", noise, run={"policy": str(policy), **ledger_key})
        assert ("THE NOISE WAS SEEDED" in str(refused.value)) is (noise == "seeded")


def test_curves_of_seeded_runs_say_so_wherever_an_epsilon_stands() -> None:
    from reproduction import plot, tradeoff

    point = {"compression": 0.1, "epsilon_target": 1.0, "seeds": 1, "sound": True, "delta": 1e-5}
    point |= {"neighbours": "add-remove", "sampling": "poisson", "noise": "seeded"}
    point |= {"unit": "record", "adversary": "local"}
    point |= {key: {"mean": 90.0, "std": None} for key in ("accuracy_last", "accuracy_best")}
    assert "SEEDED NOISE" in plot.epsilon_label([point])
    assert tradeoff.as_csv({"points": [point]}).splitlines()[1].endswith(",seeded")
    assert "SEEDED" not in plot.epsilon_label([{**point, "noise": "secure"}])


def test_a_site_says_so_of_its_ledger(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")
    import attacked_site

    from fedspa.flower import check

    node = dict(attacked_site.target(tmp_path, present=False).node)
    with Ledger.open(node["ledger"], create=False) as ledger:
        ledger.reserve("clinic", replace(EVENT, noise="seeded"), "run", "0")
    told = "\n".join(finding.detail for finding in check.check_node(node))
    assert "add-remove, rdp filter" in told
    assert "THE NOISE WAS SEEDED" in told


def test_all_agents_of_a_ledger_are_listed_with_what_priced_them(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.reserve("a", EVENT, "run", "0")
    for words in ((), ("--all",)):
        assert "accountant rdp filter" in said("ledger", "show", str(tmp_path / "ledger.sqlite"), *words)


def test_a_true_guarantee_is_not_spoken_down(tmp_path: Path) -> None:
    run(tmp_path / "run", "secure")
    ledger = str(tmp_path / "run/ledger.sqlite")
    page = (tmp_path / "run/report.html").read_text("utf-8")
    for text in (said("ledger", "show", ledger), said("ledger", "verify", ledger), page):
        assert "SEEDED" not in text.replace("none: a simulation", "")
    assert "Guarantee for each record" in page


def test_a_python_user_is_warned_once_a_run(tmp_path: Path) -> None:
    with pytest.warns(fedspa.SeededNoiseWarning, match="neither its uploads nor its model are private") as caught:
        fedspa.run(small(tmp_path / "a"))
    assert len([one for one in caught if one.category is fedspa.SeededNoiseWarning]) == 1
    assert issubclass(fedspa.SeededNoiseWarning, UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fedspa.SeededNoiseWarning)
        fedspa.run(small(tmp_path / "b", privacy={"noise": "secure"}))
        fedspa.run(small(tmp_path / "c", algorithm={"name": "fedavg", "compression": 1.0}))


def test_an_edited_config_does_not_hide_a_seed(tmp_path: Path) -> None:
    """The ledger knows, and its chain covers the mode."""
    run(tmp_path / "run", "seeded")
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text("utf-8").replace('noise = "seeded"', 'noise = "secure"'), "utf-8")
    said("report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "the ledger says that the noise was seeded, the config secure" in page
    assert "none: a simulation" in page


class TestEvents:
    def test_the_mode_is_in_the_text_and_its_absence_is_not(self) -> None:
        assert 'noise":"' not in EVENT.to_json()
        for mode in ("secure", "exact", "seeded"):
            event = replace(EVENT, noise=mode)
            assert event_of(event.to_json()) == event != EVENT
        for wrong in ('"noise":null,', '"noise":"none",'):
            with pytest.raises(fedspa.FedspaError):
                event_of(EVENT.to_json().replace('"noise_m', wrong + '"noise_m'))

    def test_the_mode_splits_no_price(self) -> None:
        """Ten participations cost what ten cost, whatever their noise came from; not five and five."""
        mixed = {EVENT: 2, replace(EVENT, noise="secure"): 3, replace(EVENT, noise="exact"): 1}
        mixed[replace(EVENT, noise="seeded")] = 4
        assert as_server_saw(mixed) == {EVENT: 10}
        spent = total(mixed, 1e-5, "add-remove", FirstPlan(replace(EVENT, noise="secure"), 10))
        assert spent.epsilon <= epsilon({EVENT: 10}, 1e-5, neighbours="add-remove")
        assert noise_modes(mixed) == {"exact": 1, "secure": 3, "seeded": 4, "unrecorded": 2}
        words = seeded_warning(noise_modes(mixed))
        assert words.startswith("THE NOISE OF 4 OF 10 PARTICIPATIONS WAS SEEDED")
        assert seeded_warning({"secure": 3, "unrecorded": 1}) is None

    def test_an_entry_has_one_mode(self, tmp_path: Path) -> None:
        with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
            ledger.reserve("a", EVENT, "run", "0")
            ledger.reserve("a", replace(EVENT, noise="secure"), "run", "1", cap=PrivacyBudget(100, 1e-5, "add-remove"))
            for message, event in (
                ("0", replace(EVENT, noise="seeded")),
                ("1", replace(EVENT, noise="seeded")),
                ("1", EVENT),
            ):
                with pytest.raises(fedspa.FedspaError, match="another event"):
                    ledger.reserve("a", event, "run", message)
