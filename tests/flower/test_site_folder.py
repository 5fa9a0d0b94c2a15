"""`fedspa site` and `fedspa server`: folders that are ready, and a check that finds what is not."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedspa.cli import app
from fedspa.errors import ConfigError, failures
from fedspa.flower import check, folders, start
from fedspa.flower.folders import make_certificate

QUICKSTART = Path(__file__).parents[2] / "examples/flower-quickstart"


def called(*arguments: object) -> tuple[int, str]:
    ended = CliRunner().invoke(app, [*map(str, arguments)])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server and a site that is ready to join it."""
    home = tmp_path_factory.mktemp("federation")
    assert called("server", "new", home / "server", "--name", "server.example")[0] == 0
    certificate = home / "server/ca.crt"
    assert called("site", "new", home / "north", "--certificate", certificate)[0] == 0
    rng = np.random.default_rng(0)
    np.savez(home / "north/records.npz", x=rng.normal(size=(50, 3)), y=rng.integers(0, 2, 50))
    assert called("site", "pin", home / "north", QUICKSTART)[0] == 0
    return home


@pytest.fixture
def site(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check, "filesystem", lambda path: "ext4")  # a machine's /tmp may lie in memory
    return Path(shutil.copytree(made / "north", tmp_path / "north"))


@pytest.fixture
def server(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "server", tmp_path / "server"))


def failed(folder: Path, *options: str) -> dict[str, str]:
    """The details of a site's failed checks, by their subjects."""
    code, output = called("site", "check", folder, "--json", *options)
    found = json.loads(output)
    assert (code == 0) == found["ready"]
    return {each["subject"]: each["detail"] for each in found["checks"] if each["passed"] is False}


def failed_at_server(folder: Path) -> dict[str, str]:
    checks = check.examine_server(folders.read_server_folder(folder))
    return {check.subject: check.detail for check in failures(checks)}


def test_a_new_site_is_ready_but_for_what_its_people_must_bring(tmp_path):
    code, output = called("site", "new", tmp_path / "south")
    assert code == 0
    assert "fedspa site check" in output
    missing = failed(tmp_path / "south")
    assert missing.keys() >= {"records", "certificate", "apps"}
    assert missing["records"].startswith(
        f"there are no records yet: '{tmp_path / 'south' / 'records.npz'}' is not there;"
    )
    assert len((tmp_path / "south/README.md").read_text().splitlines()) == 4
    site = folders.read_site_folder(tmp_path / "south")
    assert site.agent == "south"
    for private in (site.path, site.key):
        assert stat.S_IMODE(private.stat().st_mode) & 0o077 == 0


def test_a_ready_site_says_so_first(site, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    code, output = called("site", "check", site)
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == "north: ready"
    assert all(line.split()[0] in ("ok", "–") for line in lines[1:])
    assert "50 of shape" in output
    assert "terms 1, mask 1, payload 1, pricing 2, sum 1" in output


@pytest.mark.parametrize(
    ("subject", "words", "spoil"),
    [
        ("policy", "epsilon is missing", lambda site: (site / "policy.toml").write_text("delta = 1e-5\n")),
        ("records", "promises nothing to 50 records", lambda site: _replace(site / "policy.toml", "1e-5", "0.1")),
        ("records", "there are no records yet: '", lambda site: (site / "records.npz").unlink()),
        ("records", "is damaged, or not an .npz", lambda site: (site / "records.npz").write_text("none")),
        ("records", "records.csv' is no file", lambda site: _table(site)),
        ("node", "unknown key clases", lambda site: _replace(site / "site.toml", "classes", "clases")),
        ("node", "is missing; restore it", lambda site: (site / "ledger/ledger.sqlite").unlink()),
        ("ledger file", "anchor", lambda site: (site / "ledger/ledger.sqlite.anchor").unlink()),
        ("node key", "mode 644", lambda site: (site / "node.key").chmod(0o644)),
        ("node key", "holds no private key", lambda site: (site / "node.key").write_text("none")),
        ("certificate", "No such file", lambda site: (site / "ca.crt").unlink()),
        ("certificate", "holds no certificate", lambda site: (site / "ca.crt").write_text("none")),
        ("apps", "none pinned", lambda site: (site / "apps.sha256").write_text("# none\n")),
        ("apps", "line 1: 'abc' is no SHA-256", lambda site: (site / "apps.sha256").write_text("abc  app\n")),
    ],
)
def test_a_failed_check_is_named(site, subject, words, spoil):
    spoil(site)
    assert words in failed(site)[subject]


def _table(site: Path) -> None:
    """Named in site.toml, described, and not there."""
    _replace(site / "site.toml", "records.npz", "records.csv")
    _replace(site / "site.toml", "classes = 2", 'classes = 2\nschema = "schema.toml"')
    column = 'age = {kind = "number", range = [0, 1]}\nsick = {kind = "flag", target = true}'
    (site / "schema.toml").write_text(f"[data.table.columns]\n{column}\n")


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(("kind", "words"), [("tmpfs", "on a memory file system"), ("nfs4", "lies on another machine")])
def test_a_ledger_on_a_disk_that_forgets(site, monkeypatch, kind, words):
    monkeypatch.setattr(check, "filesystem", lambda path: kind)
    assert words in failed(site)["ledger disk"]


def test_a_server_that_is_not_there(site):
    _replace(site / "site.toml", "server.example:8443", "127.0.0.1:1")
    assert "127.0.0.1:1: Connection refused" in failed(site, "--server")["server"]


def test_a_site_that_is_not_running_is_unhealthy(site):
    _replace(site / "site.toml", "port = 9094", "port = 1")
    code, output = called("site", "status", site, "--prometheus", site / "metrics.prom")
    assert code == 1
    assert output == "north: unhealthy: its node is not running (127.0.0.1:1: Connection refused)\n"
    assert "fedspa_site_epsilon" in (site / "metrics.prom").read_text()
    (site / "ledger/ledger.sqlite").unlink()
    assert "ledger.sqlite is missing" in called("site", "status", site)[1]


def test_the_node_gets_what_the_folder_says(site):
    """In Flower's own reading of its flags, with absolute paths."""
    from flwr.common.config import parse_config_args
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    read = folders.read_site_folder(site)
    flags = _parse_args_run_supernode().parse_args(start.node_arguments(read))
    assert (flags.superlink, flags.port, flags.insecure) == ("server.example:8443", 9094, False)
    assert flags.auth_supernode_private_key == str(site / "node.key")
    node = parse_config_args([flags.node_config])
    assert node == dict(read.node)
    assert node["ledger"] == str(site / "ledger/ledger.sqlite")


@pytest.mark.parametrize("spoil", ["apps", "ledger"])
def test_a_node_does_not_start_without_app_or_ledger(site, monkeypatch, spoil):
    monkeypatch.setattr(start, "_enter", lambda folder: pytest.fail("it was started"))
    if spoil == "apps":
        (site / "apps.sha256").write_text("")
    else:
        (site / "ledger/ledger.sqlite").unlink()
    with pytest.raises(ConfigError, match=r"names no app|is missing; put it back"):
        start.run_site(folders.read_site_folder(site))


@pytest.mark.parametrize("what", ["site", "server"])
def test_what_runs_already_is_named_by_its_port(request, monkeypatch, what):
    folder = request.getfixturevalue(what)
    monkeypatch.setattr(start, "_enter", lambda folder: pytest.fail("it was started"))
    read = folders.read_site_folder(folder) if what == "site" else folders.read_server_folder(folder)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = start.run_site if what == "site" else start.run_server
        with pytest.raises(ConfigError, match=rf"port {port} of .* running already.*set another port in .*{what}.toml"):
            run(replace(read, port=port))


@given(st.text(max_size=60), st.sampled_from(["node", "superlink", "address", "port", "key"]))
def test_any_text_is_a_site_or_one_line(text, word):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "site.toml"
        path.write_text(f"[node]\n{word} = {text}\n[superlink]\n{word} = {text}\n", "utf-8", newline="")
        with pytest.raises(ConfigError) as caught:
            folders.read_site_folder(path)
    assert "\n" not in str(caught.value)


def test_a_server_starts_after_its_checks_or_not_at_all(server, monkeypatch):
    started = []
    monkeypatch.setattr(start, "run_server", started.append)
    code, output = called("server", "run", server)
    assert (code, len(started)) == (0, 1)
    assert output.splitlines()[0] == "server: ready"
    assert "server.example, localhost, 127.0.0.1" in " ".join(output.split())  # however long the path before it
    (server / "server.key").chmod(0o640)
    code, output = called("server", "run", server)
    assert (code, len(started)) == (1, 1)
    assert output.splitlines()[0] == "server: not ready: 1 check failed"


@pytest.mark.parametrize(
    ("subject", "words", "spoil"),
    [
        ("certificate", "holds no certificate", lambda server: (server / "server.pem").write_text("")),
        ("key", "mode 640", lambda server: (server / "server.key").chmod(0o640)),
        ("nodes", "holds no public key", lambda server: (server / "nodes/north.pub").write_text("x")),
    ],
)
def test_a_failed_check_of_the_server_is_named(server, subject, words, spoil):
    spoil(server)
    assert words in failed_at_server(server)[subject]


def test_a_certificate_of_another_authority(server, tmp_path):
    (tmp_path / "other").mkdir()
    make_certificate(tmp_path / "other", "server.example")
    shutil.copy(tmp_path / "other/ca.crt", server / "ca.crt")
    assert "did not sign it" in failed_at_server(server)["authority"]
    shutil.copy(tmp_path / "other/server.pem", server / "server.pem")
    assert "is not the key of" in failed_at_server(server)["key"]


def test_the_superlink_gets_what_the_folder_says(server):
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    flags = _parse_args_run_superlink().parse_args(start.superlink_arguments(folders.read_server_folder(server)))
    assert (flags.host, flags.port, flags.enable_supernode_auth) == ("0.0.0.0", 8443, True)
    assert flags.ssl_keyfile == str(server / "server.key")
    assert flags.database == str(server / "superlink.db")


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("privacy.epsilom=2", "privacy.epsilom is no key .*did you mean 'privacy.epsilon'"),
        ("privacy.epsilon=2 federation.round=3", "federation.round is no key .*did you mean 'federation.rounds'"),
        ("rounds=3", "rounds is no key"),
    ],
)
def test_a_key_that_the_app_lacks_is_named(server, tmp_path, given, fault):
    called("new", "--flower", tmp_path / "app")
    with pytest.raises(ConfigError, match=fault):
        start.train(folders.read_server_folder(server), tmp_path / "app", given, None, lambda _: None)
