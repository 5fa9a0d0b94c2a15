"""`fedspa site`: keys and rosters on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedspa.cli import app
from fedspa.errors import ConfigError
from fedspa.secagg.keys import Roster, SecretKey, fingerprint


def called(*arguments: object) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["site", *map(str, arguments)])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.output


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """The keys of two sites and the roster of both."""
    lines = ["[members]"]
    for name in ("clinic-a", "clinic-b"):
        code, said = called("keygen", tmp_path / f"{name}.key")
        assert code == 0
        public = re.search(r"^public key +([0-9a-f]{64})$", said, flags=re.M)
        lines.append(f'{name} = "{public[1]}"')
    (tmp_path / "roster.toml").write_text("\n".join(lines))
    return tmp_path


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "site.key"
    code, said = called("keygen", path)
    secret = SecretKey.load(path)
    assert code == 0
    assert said == f"public key   {secret.public.hex()}\nfingerprint  {fingerprint(secret.public)}\n"
    assert path.read_text().split()[1] not in said
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="File exists"):
        called("keygen", path)
    assert path.read_bytes() == before


def test_a_sound_roster(sites: Path) -> None:
    code, said = called("roster", sites / "roster.toml")
    roster = Roster.load(sites / "roster.toml")
    assert code == 0
    assert said.splitlines() == [
        *(f"{name}  {fingerprint(public)}" for name, public in roster.members.items()),
        f"digest  {roster.digest}",
        f"{sites / 'roster.toml'}: valid; 2 members",
    ]


def test_what_is_refused(sites: Path) -> None:
    with pytest.raises(ConfigError, match="--name requires --key"):
        called("roster", sites / "roster.toml", "--name", "clinic-a")
    text = (sites / "roster.toml").read_text()
    (sites / "twice.toml").write_text(text + text.splitlines()[1].replace("clinic-a", "\nclinic-c"))
    with pytest.raises(ConfigError, match="'clinic-a' and 'clinic-c' have the same public key"):
        called("roster", sites / "twice.toml")
    (sites / "roster.toml").chmod(0o600)
    with pytest.raises(ConfigError, match="no secret key"):
        called("roster", sites / "roster.toml", "--key", sites / "roster.toml")
