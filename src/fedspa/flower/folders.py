"""The folder of a site and that of the server: what their TOML files say. Paths in them are relative to the folder.
Keys and certificates are made once, and private halves can be read by their owner only.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import Field, ValidationError

from fedspa import toml
from fedspa.data.plugin import is_plugin
from fedspa.errors import ConfigError, describe_invalid, os_errors_as, quoted
from fedspa.runs.sections import Section

_DAYS = 365
_PEM = serialization.Encoding.PEM


def make_certificate(folder: Path, host: str) -> None:
    """ca.crt, server.pem and server.key for a server that is reached as `host`, and as localhost.

    The authority signs this one certificate, and its key is thrown away: there is none to steal. With an authority of
    your own, put its files in the place of these.
    """
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of one certificate")])
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "superlink")])
    ca = (
        _certificate(ca_name, ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA384())
    )
    names = [_alternative(name) for name in dict.fromkeys((host, "localhost", "127.0.0.1"))]
    server = (
        _certificate(server_name, ca_name, server_key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    (folder / "ca.crt").write_bytes(ca.public_bytes(_PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(_PEM))
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_private(folder / "server.key", server_key.private_bytes(_PEM, pkcs8, plain))


def make_node_key(path: Path) -> None:
    """A node's key, as `ssh-keygen -t ecdsa -b 384` makes it; its public half lies beside it, with .pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    openssh, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    write_private(path, key.private_bytes(_PEM, openssh, plain))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def write_private(path: Path, content: bytes) -> None:
    """A new file that its owner alone can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)


def node_key_problem(path: Path) -> str | None:
    """Return what is wrong with a node's private key, if anything."""
    remedy = f"make one: ssh-keygen -t ecdsa -b 384 -N '' -f {path}"
    try:
        key = serialization.load_ssh_private_key(_read_private(path), None)
    except ConfigError as error:
        return str(error)
    except (ValueError, TypeError):
        return f"{path} holds no private key without a password; {remedy}"
    return None if isinstance(key, ec.EllipticCurvePrivateKey) else f"{path} is no ECDSA key; {remedy}"


def server_key_problem(key: Path, certificate: Path) -> str | None:
    """Return what is wrong with the server's private key, if anything."""
    try:
        public = serialization.load_pem_private_key(_read_private(key), None).public_key()
    except ConfigError as error:
        return str(error)
    except (ValueError, TypeError):
        return f"{key} holds no private key without a password"
    same = read_certificate(certificate).public_key() == public
    return None if same else f"{key} is not the key of {certificate}; put the pair there that belongs together"


def read_certificate(path: Path) -> x509.Certificate:
    with os_errors_as(ConfigError, str(path), "put the certificate there (PEM)"):
        content = path.read_bytes()
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise ConfigError(f"{path} holds no certificate in PEM; put the right file there") from None


def days_left(certificate: x509.Certificate) -> int:
    """Return the days until it ends; negative if it has ended."""
    return (certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the addresses by which its owner may be reached."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]


def _read_private(path: Path) -> bytes:
    """Read a file that its owner alone can read; raise a ConfigError for any other."""
    with os_errors_as(ConfigError, str(path)):
        mode, content = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    if os.name == "posix" and mode & 0o077:
        raise ConfigError(f"{path} can be read by others than its owner (mode {mode:o}): chmod 600 {path}")
    return content


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
    )


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
