"""Keys and certificates of a federation: made once, private halves for their owner's eyes only."""

from __future__ import annotations

import datetime
import ipaddress
import os
import stat
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedspa.errors import ConfigError, os_errors_as

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
    content, problem = _private(path)
    if problem is not None:
        return problem
    try:
        key = serialization.load_ssh_private_key(content, None)
    except (ValueError, TypeError):
        return f"{path} holds no private key without a password; make one: ssh-keygen -t ecdsa -b 384 -N '' -f {path}"
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return f"{path} is no ECDSA key; make one: ssh-keygen -t ecdsa -b 384 -N '' -f {path}"
    return None


def server_key_problem(key: Path, certificate: Path) -> str | None:
    """Return what is wrong with the server's private key, if anything."""
    content, problem = _private(key)
    if problem is not None:
        return problem
    try:
        public = serialization.load_pem_private_key(content, None).public_key()
        same = read_certificate(certificate).public_key() == public
    except (ValueError, TypeError):
        return f"{key} holds no private key without a password"
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


def _private(path: Path) -> tuple[bytes, str | None]:
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(100_000)
    except OSError as error:
        return b"", f"{path}: {error.strerror or error}"
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        return b"", f"{path} can be read by others than its owner (mode {stat.S_IMODE(mode):o}): chmod 600 {path}"
    return content, None


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
