"""Whether a node or the server is there and can do its work, in one line: for a container's or systemd's watchdog."""

from __future__ import annotations

import socket
import ssl

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.policy import Policy
from fedspa.errors import FedspaError
from fedspa.flower.operate.folders import ServerFolder, SiteFolder, address_parts

_SECONDS = 5.0


def of_site(site: SiteFolder) -> tuple[bool, str]:
    """A site is well where its node listens, its policy can be read, and its ledger lacks nothing that it knew of."""
    try:
        Policy.load(site.policy)
        with Ledger.read(site.ledger) as ledger:
            entries = ledger.position().entries
        site.digests()
    except FedspaError as error:
        return False, f"{site.agent}: NOT well: {error}"
    if (problem := listens("127.0.0.1", site.port)) is not None:
        return False, f"{site.agent}: NOT well: its node is not running ({problem})"
    return True, f"{site.agent}: well; its ledger holds {entries} entries"


def of_server(server: ServerFolder) -> tuple[bool, str]:
    """The server is well where it answers under its own certificate."""
    host, port = address_parts(server.address)
    if (problem := answers_tls(host, port, str(server.authority))) is not None:
        return False, f"server: NOT well: {problem}"
    return True, f"server: well; it answers on port {port}"


def listens(host: str, port: int) -> str | None:
    """Why nothing can be reached there; None where something can."""
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"
    return None


def answers_tls(host: str, port: int, authority: str) -> str | None:
    """Why no server with a certificate that `authority` signed for `host` can be reached there; None where one can."""
    try:
        context = ssl.create_default_context(cafile=authority)
        with (
            socket.create_connection((host, port), timeout=_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        return f"{host}:{port} has a certificate that {authority} does not vouch for ({error.verify_message})"
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"
