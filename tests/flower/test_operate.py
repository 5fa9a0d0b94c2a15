"""A running site's numbers and logs: nothing in them is made of records."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import Refusal
from fedspa.flower import client_app, folders, monitor
from fedspa.mechanisms.gaussian.plan import GaussianEvent

from .local_grid import POLICY


def folder_of(node: dict, home: Path) -> folders.SiteFolder:
    return folders.SiteFolder(home, node, "server:1", home / "ca.crt", home / "node.key", 1, home / "apps.sha256")


def samples(text: str) -> dict[str, float]:
    """By name and labels; the format is what Prometheus reads."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP fedspa_\w+ .+\.|TYPE fedspa_\w+ (counter|gauge))", line), line
            continue
        match = re.fullmatch(r'(fedspa_[a-z_]+(?:\{(?:\w+="[^"\n]*",?)+\})?) (\+Inf|[0-9.e+-]+)', line)
        assert match is not None, line
        found[match[1]] = float(match[2])
    return found


def test_a_sites_numbers_follow_its_rounds(deployment, train, tmp_path):
    train(deployment, federation__rounds=2)
    node = deployment.nodes[100]
    found = samples(monitor.site_metrics(folder_of(node, tmp_path)))
    (rounds,) = [value for name, value in found.items() if name.startswith("fedspa_site_rounds_total")]
    assert rounds == found["fedspa_site_payloads_total"] == 2
    spent, left = (found[f'fedspa_site_epsilon{name}{{against="the server"}}'] for name in ("", "_left"))
    assert 0 < spent < 8
    assert spent + left == pytest.approx(8)
    assert 0 <= found["fedspa_site_last_round_age_seconds"] < 600


@pytest.mark.parametrize("participations", [(10, 0), (40, 5), (3, 20)])
def test_no_plan_costs_more_than_all_of_them(tmp_path, participations):
    """A plan and the total are priced by one rule: the first plan by PLD as a whole, all others by the filter."""
    first = GaussianEvent("poisson", 20, 400, 5, 2.0, noise="secure")
    other = GaussianEvent("poisson", 30, 400, 5, 2.5, noise="secure")
    (tmp_path / "policy.toml").write_text(POLICY.format(epsilon=50.0))
    node = {"agent": "north", "ledger": str(tmp_path / "l.sqlite"), "policy": str(tmp_path / "policy.toml")}
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        for name, event, times in zip(("run", "next"), (first, other), participations):
            for t in range(times):
                ledger.reserve("north", event, name, f"round-{t}", announced=40)
    found = samples(monitor.site_metrics(folder_of(node, tmp_path)))
    total = found['fedspa_site_epsilon{against="the server"}']
    plans = [value for name, value in found.items() if name.startswith("fedspa_site_epsilon_of_plan")]
    assert len(plans) == sum(map(bool, participations))
    assert 0 < max(plans) <= total
    if len(plans) == 1:
        assert plans == [total]


def test_neighbouring_records_have_the_same_numbers(deployment, train, tmp_path):
    """One site has other records, and one more of them; the payload's length may follow its noise and nothing else."""
    node = deployment.nodes[101]
    with np.load(node["data"]) as kept:
        x, y = kept["x"], kept["y"]
    np.savez(node["data"], x=np.concatenate([x * 0 + 7, x[:1]]), y=np.concatenate([y, y[:1]]))
    train(deployment, federation__rounds=2, algorithm__coding="f32")
    own, other = (samples(monitor.site_metrics(folder_of(deployment.nodes[n], tmp_path))) for n in (100, 101))
    for found in (own, other):
        found.pop("fedspa_site_last_round_age_seconds")
    assert own == other


def test_a_servers_numbers_hold_no_score(deployment, train, tmp_path):
    home = tmp_path / "server"
    train(deployment, federation__rounds=2, run__out=str(home / "runs/first"))
    names = ("authority", "certificate", "key", "database", "nodes", "runs")
    server = folders.ServerFolder(home, "0.0.0.0", 1, **{name: home / name for name in names})
    text = monitor.server_metrics(server)
    found = samples(text)
    assert found['fedspa_server_rounds_total{run="first"}'] == 2 == found['fedspa_server_rounds_planned{run="first"}']
    assert found['fedspa_server_updates_total{run="first"}'] == 8
    assert found['fedspa_server_run_finished{run="first"}'] == 1
    summary = json.loads((home / "runs/first/summary.json").read_text())
    assert found['fedspa_server_epsilon{run="first"}'] == pytest.approx(summary["epsilon"])
    assert "accuracy" not in text
    assert "loss " not in text.replace("privacy loss", "")


def test_a_watchdog_does_not_wait_for_torch_or_flower():
    program = (
        "import sys\nfrom fedspa.flower import folders, monitor\nsys.exit(bool({'torch', 'flwr'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_only_lines_of_fedspa_are_public():
    lines = (
        b"\x1b[92mINFO \x1b[0m:      SuperNode ID: 7\n"
        b"Traceback (most recent call last):\n"
        b"ValueError: patient 17 has no age\n"
        b"\n"
        b'{"time": "2026-01-01", "level": "WARNING", "logger": "fedspa.agent", "event": "refused", "code": "data"}\n'
    )
    out, private = io.BytesIO(), io.BytesIO()
    monitor.convert(io.BytesIO(lines), out, private)
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["event"], line["code"]) for line in told] == [("refused", "data")]
    assert b"patient 17" in private.getvalue()
    monitor.convert(io.BytesIO(b"\x1b[92mplain words\x1b[0m\n"), out, None)  # a server has no private lines
    assert json.loads(out.getvalue().splitlines()[-1])["event"] == "plain words"


@pytest.mark.parametrize(
    "line",
    [
        "WARNING:root:patient 17 has no age",  # logging.basicConfig()
        "WARNING :   patient 17 has no age",  # as Flower's own
        "    WARNING :   patient 17 has no age",  # a traceback quotes
        '{"time": "2026-01-01", "level": "WARNING", "message": "patient 17 has no age"}',
        '{"time": "2026-01-01", "level": "WARNING", "logger": "root", "event": "patient 17 has no age"}',
    ],
)
def test_what_a_data_function_logs_stays_private(line):
    out, private = io.BytesIO(), io.BytesIO()
    monitor.convert(io.BytesIO(line.encode() + b"\n"), out, private)
    assert out.getvalue() == b""
    assert private.getvalue() == line.encode() + b"\n"


@pytest.fixture
def agents_logger():
    """fedspa's logger as a new process has it."""
    logger = logging.getLogger("fedspa")
    kept = logger.handlers, logger.level, logger.propagate
    logger.handlers = []
    yield logger
    logger.handlers, logger.propagate = kept[0], kept[2]
    logger.setLevel(kept[1])


@pytest.fixture
def json_logs(tmp_path, monkeypatch, agents_logger, capfd):
    """The agent's logger as it is in a node that logs as JSON."""
    monkeypatch.setenv("FEDSPA_LOG_FORMAT", "json")
    monkeypatch.setenv("FEDSPA_LOG_PRIVATE", str(tmp_path / "agent.log"))
    monitor.set_up()
    return tmp_path / "agent.log"


def test_a_sites_log_has_time_round_run_and_what_was_spent(deployment, train, monkeypatch, agents_logger):
    monkeypatch.setenv("FEDSPA_LOG_FORMAT", "text")
    monitor.set_up()
    [handler] = agents_logger.handlers
    handler.stream = io.StringIO()
    train(deployment, federation__rounds=2)
    lines = [line for line in handler.stream.getvalue().splitlines() if "answered" in line]
    found = [
        re.fullmatch(
            r"\d{4}-\d\d-\d\d [\d:,]+ INFO fedspa.agent: round-(\d) of run \w+: answered, "
            r"ε = [\d.]+ of [\d.]+ \(δ = \S+, add-remove\) spent",
            line,
        )
        for line in lines
    ]
    assert {None if one is None else one[1] for one in found} == {"0", "1"}, lines


def test_an_agents_line_has_the_code_and_its_words_are_in_the_private_file(
    deployment, train, json_logs, capfd, monkeypatch
):
    logging.getLogger("fedspa").handlers[0].stream = sys.stderr  # pytest's own, which changes after fixtures

    def refuse(*_):
        raise Refusal("data", "the record of patient 17 cannot be read")

    def fail(*_):
        raise RuntimeError("patient 18")

    for broken in (refuse, fail):
        monkeypatch.setattr(client_app, "answer_round", broken)
        train(deployment, federation__rounds=1, run__out=str(json_logs.parent / broken.__name__))
    told = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith('{"time"')]
    assert {(line["event"], line.get("code")) for line in told} == {("refused", "data"), ("refused", "internal")}
    assert "patient" not in json.dumps(told)
    assert "patient 17" in json_logs.read_text()
    assert "patient 18" in json_logs.read_text()
    assert json_logs.stat().st_mode & 0o077 == 0
