"""The folder of a site and that of the server: what their TOML files say. Paths in them are relative to the folder."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedspa import toml
from fedspa.data.plugin import is_plugin
from fedspa.errors import ConfigError, quoted, worded

SITE, SERVER = "site.toml", "server.toml"
_PATHS: Final = ("data", "schema", "policy", "ledger", "key", "roster")  # of a node-config
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"(?!-)[0-9A-Za-z_-]{1,63}(?<!-)")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True)
class SiteFolder:
    """A site: its node-config, and how its node joins. `certificate` is that of the authority which signed the
    server's, `key` the node's own, `port` where the node's own processes find it on this machine, `apps` a file with
    the digests of the apps that were reviewed here."""

    path: Path
    node: Mapping[str, Any]
    superlink: str
    certificate: Path
    key: Path
    port: int
    apps: Path

    @property
    def agent(self) -> str:
        return str(self.node.get("agent", self.path.name))

    @property
    def ledger(self) -> Path:
        if not isinstance(self.node.get("ledger"), str):
            raise ConfigError(f'{self.path / SITE}: node.ledger is missing; name the file, as ledger = "ledger.sqlite"')
        return Path(self.node["ledger"])

    @property
    def policy(self) -> Path:
        if not isinstance(self.node.get("policy"), str):
            raise ConfigError(f'{self.path / SITE}: node.policy is missing; name the file, as policy = "policy.toml"')
        return Path(self.node["policy"])

    @property
    def node_config(self) -> str:
        """As Flower takes it."""
        return " ".join(f"{key}={json.dumps(value)}" for key, value in self.node.items())

    def digests(self) -> list[str]:
        """Of the apps that this site runs; a file's lines are those of sha256sum."""
        found = []
        for number, line in enumerate(toml.text(self.apps, "a list of digests").splitlines(), 1):
            word = line.partition("#")[0].split()[:1]
            if word and not _DIGEST.fullmatch(word[0]):
                raise ConfigError(
                    f"{self.apps}, line {number}: {quoted(word[0], 80)} is no SHA-256; `fedspa site pin` writes it"
                )
            found += word
        return found


@dataclass(frozen=True)
class ServerFolder:
    """The server: where it listens, by which certificate, and where it keeps what it knows. `authority` is what sites
    check the certificate with, `nodes` the folder of the sites' public keys, `runs` that of the runs."""

    path: Path
    host: str
    port: int
    authority: Path
    certificate: Path
    key: Path
    database: Path
    nodes: Path
    runs: Path

    @property
    def address(self) -> str:
        """For whoever asks from the same machine."""
        return f"127.0.0.1:{self.port}"


def read_site(folder: Path) -> SiteFolder:
    """The site in `folder`, or of the site.toml that is named."""
    path, table = _read(folder, SITE, "fedspa site new")
    node, link = _tables(path, table, {"node": None, "superlink": ("address", "certificate", "key", "port", "apps")})
    home = path.parent
    for key in _PATHS:
        value = node.get(key)
        if isinstance(value, str) and value and not (key == "data" and is_plugin(value)):
            node[key] = str(home / value)
    address = _text(path, "superlink", link, "address")
    require_address(f"{path}: superlink.address", address)
    return SiteFolder(
        path=home,
        node=node,
        superlink=address,
        certificate=home / _text(path, "superlink", link, "certificate"),
        key=home / _text(path, "superlink", link, "key"),
        port=_port(path, "superlink", link),
        apps=home / _text(path, "superlink", link, "apps"),
    )


def read_server(folder: Path) -> ServerFolder:
    """The server in `folder`, or of the server.toml that is named."""
    keys = ("host", "port", "authority", "certificate", "key", "database", "nodes", "runs")
    path, table = _read(folder, SERVER, "fedspa server new")
    (link,) = _tables(path, table, {"superlink": keys})
    home = path.parent
    files = {key: home / _text(path, "superlink", link, key) for key in keys if key not in ("host", "port")}
    return ServerFolder(home, _text(path, "superlink", link, "host"), _port(path, "superlink", link), **files)


def require_address(key: str, address: str) -> None:
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(f"{key} is {quoted(address)}; it must be host:port, as server.example:8443")


def is_host(name: str) -> bool:
    """Whether a machine can be reached by it: an address, or a name that a certificate can hold."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return len(name) <= 253 and all(map(_LABEL.fullmatch, name.split(".")))
    return True


def address_parts(address: str) -> tuple[str, int]:
    """Host and port, without an IPv6 address's brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def make(folder: Path) -> None:
    """A folder of its owner's alone, new or empty."""

    def words(reason: str) -> str:
        return f"{folder}: {reason}; name a folder that can be written"

    with worded(ConfigError, words):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder: keys and ledgers are made once")
        folder.chmod(0o700)


def _read(folder: Path, name: str, made_by: str) -> tuple[Path, dict[str, Any]]:
    path = folder if folder.name == name else folder / name
    return path.absolute(), toml.read(path, f"a folder that `{made_by}` made")


def _tables(
    path: Path, table: dict[str, Any], expected: Mapping[str, tuple[str, ...] | None]
) -> tuple[dict[str, Any], ...]:
    """The tables by name; those of None may have any keys, which others check."""
    for name in table:
        if name not in expected:
            raise ConfigError(f"{path}: unknown table [{name}]; allowed: {', '.join(f'[{one}]' for one in expected)}")
    found = []
    for name, keys in expected.items():
        values = table.get(name)
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: the table [{name}] is missing")
        for key in values:
            if keys is not None and key not in keys:
                raise ConfigError(f"{path}: unknown key {name}.{key}; allowed: {', '.join(keys)}")
        found.append(dict(values))
    return tuple(found)


def _text(path: Path, table: str, values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: {table}.{key} is {'missing' if value is None else quoted(value)}; write a text")
    return value


def _port(path: Path, table: str, values: Mapping[str, Any]) -> int:
    value = values.get("port")
    if type(value) is not int or not 1 <= value <= 65535:
        raise ConfigError(
            f"{path}: {table}.port is {'missing' if value is None else quoted(value)}; write a number up to 65535"
        )
    return value
