"""A SuperNode that runs reviewed code only: `python -m fedspa.flower.supernode --fab-sha256 HASH <options>`.

In Flower the server ships the code that agents run. Whoever controls that code controls what leaves, whatever policy
and ledger say. Here the agent's operator reviews an app, builds it (`flwr build`), and starts the node with the digest
of the built file; an app of any other content is answered with Flower's own "invalid FAB" and never unpacked. The
option may be given several times. All other options are those of `flower-supernode`.

Flower can do the same by signatures (`--trusted-entities`), with a SuperLink that is tied to Flower's hub; this needs
nobody. It takes the place of that check in flwr 1.41, and refuses to start where that is not found as it was.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flwr.supercore.fab import Fab
from flwr.supernode import start_client_internal as internal

from fedspa.errors import ConfigError

_OPTION = "--fab-sha256"


def allowed_digests(arguments: list[str]) -> tuple[frozenset[str], list[str]]:
    """The digests given by `--fab-sha256`, and the arguments without them."""
    digests, others = set(), []
    rest = iter(arguments)
    for argument in rest:
        if argument != _OPTION:
            others.append(argument)
            continue
        digest = next(rest, "").lower()
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ConfigError(f"{_OPTION} is {digest!r}; it must be 64 hexadecimal digits: sha256sum of the built app")
        digests.add(digest)
    if not digests:
        raise ConfigError(f"{_OPTION} is missing; give the sha256sum of each app that this node may run")
    return frozenset(digests), others


def pin(allowed: frozenset[str]) -> None:
    """From here on, a SuperNode of this process takes an app only if its content has one of these digests."""
    pull: Callable[..., int | None] = internal._pull_and_store_message
    if not {"get_fab", "trusted_entities"} <= set(inspect.signature(pull).parameters):
        raise ConfigError("this flwr checks apps in another way than 1.41 does; install flwr 1.41")

    def pinned_pull(*, get_fab: Callable[[str, int], Fab], **others: Any) -> int | None:
        def get(digest: str, run: int) -> Fab:
            return replace(get_fab(digest, run), verifications={"valid_license": "pinned"})

        # Not empty: Flower then asks `_verify_fab` before it unpacks anything, and answers for us where that says no.
        return pull(get_fab=get, **(others | {"trusted_entities": {"pinned": "by digest"}}))

    def verify(fab: Fab, trusted_entities: dict[str, str]) -> bool:
        return hashlib.sha256(fab.content).hexdigest() in allowed

    flower: Any = internal
    flower._pull_and_store_message, flower._verify_fab = pinned_pull, verify


def main() -> None:
    from flwr.supernode.cli import flower_supernode

    try:
        allowed, sys.argv[1:] = allowed_digests(sys.argv[1:])
        pin(allowed)
    except ConfigError as error:
        print(f"fedspa: {error}", file=sys.stderr)
        sys.exit(2)
    flower_supernode()


if __name__ == "__main__":
    main()
