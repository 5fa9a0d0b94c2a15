"""A SuperNode that runs reviewed code only: `fedspa site run`.

In Flower the server ships the code that agents run. Whoever controls that code controls what leaves, whatever policy
and ledger say. Here the agent's operator reviews an app and pins the digest of its bundle (`fedspa site pin`); an app
of any other content is answered with Flower's own "invalid FAB" and never unpacked.

Flower's public option for this, `--trusted-entities`, accepts only signatures that a SuperLink fetched from Flower's
hub together with the app, so that neither a site nor its server can sign one, and there is no public hook for another
check. `pin` therefore replaces that check where Flower makes it, and refuses to start where a version of Flower no
longer makes it there: `tests/flower` runs with each version that is supported.

It also mends a lag: a node that still has a reply for a run that ended (a SuperLink that was restarted) sends every
later reply one message late, so that its updates are paid for and never in time.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.supercore.fab import Fab
from flwr.supernode import start_client_internal as internal

from fedspa.errors import ConfigError, real_path, worded

TESTED = "1.42.0"  # the newest Flower that the tests ran with


def pin(allowed: frozenset[str]) -> None:
    """From here on, a SuperNode of this process takes an app only if its content has one of these digests."""
    pull: Callable[..., int | None] = internal._pull_and_store_message
    asked = tuple(inspect.signature(getattr(internal, "_verify_fab", pull)).parameters)
    if (
        not {"get_fab", "trusted_entities"} <= set(inspect.signature(pull).parameters)
        or "_verify_fab" not in pull.__code__.co_names
        or asked != ("fab", "trusted_entities")
    ):
        raise ConfigError(
            f"flwr {version('flwr')} checks apps in another way than the versions that fedspa knows, and a site runs "
            f"no app unchecked; install flwr {TESTED}: pip install 'flwr[simulation]=={TESTED}'"
        )

    def pinned_pull(*, get_fab: Callable[[str, int], Fab], **others: Any) -> int | None:
        def get(digest: str, run: int) -> Fab:
            return replace(get_fab(digest, run), verifications={"valid_license": "pinned"})

        # Not empty: Flower then asks `_verify_fab` before it unpacks anything, and answers for us where that says no.
        return pull(get_fab=get, **(others | {"trusted_entities": {"pinned": "by digest"}}))

    def verify(fab: Fab, trusted_entities: dict[str, str]) -> bool:
        return hashlib.sha256(fab.content).hexdigest() in allowed

    flower: Any = internal
    flower._pull_and_store_message, flower._verify_fab = pinned_pull, verify


def send_leftovers_first() -> None:
    """Have Flower's loop send the replies that it has before it asks for another message.

    The loop sends only after it has received, and takes any reply for the one it waits for.
    """
    pull: Callable[..., int | None] = internal._pull_and_store_message

    def pull_or_send(*, state: Any, **others: Any) -> int | None:
        # The number of a run that nobody has: not None, which would mean that there is nothing to send.
        return 0 if _has_unsent_reply(state) else pull(state=state, **others)

    flower: Any = internal
    flower._pull_and_store_message = pull_or_send


def _has_unsent_reply(state: Any) -> bool:
    entries = list(state.msg_store.values())
    return any(entry.message.metadata.reply_to_message_id and not entry.is_retrieved for entry in entries)


def serve(allowed: frozenset[str], arguments: list[str]) -> None:
    """Be a SuperNode that runs these apps, by their digests, and no other. `arguments` are flower-supernode's."""
    from flwr.supernode.cli import flower_supernode

    pin(allowed)
    send_leftovers_first()
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def digest_of(app: Path) -> str:
    """Of an app as it is shipped: of its folder, or of a bundle that `flwr build` made."""
    from click import ClickException
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    with worded(ConfigError, lambda why: f"{app}: {why}; name the folder of an app, or its .fab"):
        if app.is_file():
            if not zipfile.is_zipfile(app):
                raise ConfigError(
                    f"{app} is no Flower app: not a bundle that `flwr build` made; name the folder, or its .fab"
                )
            return hashlib.sha256(app.read_bytes()).hexdigest()
        try:
            load_and_validate(real_path(app) / "pyproject.toml")
            return hashlib.sha256(build_fab_from_disk(app)).hexdigest()
        except (ValueError, ClickException) as error:
            raise ConfigError(f"{app} is no Flower app: {' '.join(str(error).split())[:300]}") from None
