"""The folder of a site and that of the server: what their TOML files say. Paths in them are relative to the folder."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, ValidationError

from fedspa import toml
from fedspa.data.plugin import is_plugin
from fedspa.errors import ConfigError, describe_invalid, os_errors_as, quoted
from fedspa.runs.sections import Section

SITE, SERVER = "site.toml", "server.toml"
_PATHS: Final = ("data", "schema", "policy", "ledger", "key", "roster")  # of a node-config
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LABEL = re.compile(r"(?!-)[0-9A-Za-z_-]{1,63}(?<!-)")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


_Text = Annotated[str, Field(min_length=1)]
_Port = Annotated[int, Field(ge=1, le=65535)]


class _SiteLink(Section):
    address: _Text
    certificate: _Text
    key: _Text
    port: _Port
    apps: _Text


class _SiteToml(Section):
    node: dict[str, Any]  # its keys are checked where the node-config is read
    superlink: _SiteLink


class _ServerLink(Section):
    host: _Text
    port: _Port
    authority: _Text
    certificate: _Text
    key: _Text
    database: _Text
    nodes: _Text
    runs: _Text


class _ServerToml(Section):
    superlink: _ServerLink


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
        return self._file("ledger")

    @property
    def policy(self) -> Path:
        return self._file("policy")

    def _file(self, key: str) -> Path:
        if not isinstance(self.node.get(key), str):
            raise ConfigError(f'{self.path / SITE}: node.{key} is missing; name the file, as {key} = "…"')
        return Path(self.node[key])

    @property
    def node_config(self) -> str:
        """Return it as Flower takes it."""
        return " ".join(f"{key}={json.dumps(value)}" for key, value in self.node.items())

    def digests(self) -> list[str]:
        """Return the digests of the apps that this site runs; the file's lines are those of sha256sum."""
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
        """Return the address for programs on the same machine."""
        return f"127.0.0.1:{self.port}"


def read_site_folder(folder: Path) -> SiteFolder:
    """Read the site in `folder`, or of the site.toml that is named."""
    home, found = _read(folder, SITE, "fedspa site new", _SiteToml)
    node, link = dict(found.node), found.superlink
    for key in _PATHS:
        value = node.get(key)
        if isinstance(value, str) and value and not (key == "data" and is_plugin(value)):
            node[key] = str(home / value)
    require_address(f"{home / SITE}: superlink.address", link.address)
    files = {key: home / getattr(link, key) for key in ("certificate", "key", "apps")}
    return SiteFolder(path=home, node=node, superlink=link.address, port=link.port, **files)


def read_server_folder(folder: Path) -> ServerFolder:
    """Read the server in `folder`, or of the server.toml that is named."""
    home, found = _read(folder, SERVER, "fedspa server new", _ServerToml)
    link = found.superlink
    files = {key: home / value for key, value in link.model_dump(exclude={"host", "port"}).items()}
    return ServerFolder(path=home, host=link.host, port=link.port, **files)


def require_address(key: str, address: str) -> None:
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(f"{key} is {quoted(address)}; it must be host:port, as server.example:8443")


def is_host(name: str) -> bool:
    """Return whether a machine can be reached by it: an address, or a name that a certificate can hold."""
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
    with os_errors_as(ConfigError, str(folder), "name a folder that can be written"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder: keys and ledgers are made once")
        folder.chmod(0o700)


_Model = TypeVar("_Model", bound=Section)


def _read(folder: Path, name: str, made_by: str, model: type[_Model]) -> tuple[Path, _Model]:
    path = folder if folder.name == name else folder / name
    values = toml.read(path, f"a folder that `{made_by}` made")
    try:
        return path.absolute().parent, model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_invalid(error, model)}") from None
