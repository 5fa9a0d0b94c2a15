"""A member of a cohort: its name, its secret key and its pinned roster, and what it asks of a round before it masks.

Everything that is wrong with a cohort is refused as `aggregation`, before anything is paid. None of it depends on a
record: names, keys and numbers are the server's words and the site's own files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedspa.agent.participate import Invitation, Refusal, agent_name
from fedspa.algorithms.session import session_of
from fedspa.errors import ConfigError, PrivacyError
from fedspa.randomness.streams import derive_key
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.roster import Roster


@dataclass(frozen=True, slots=True)
class Member:
    """One that can be in a cohort: its own line of the roster has the key that it holds."""

    name: str
    secret: SecretKey
    roster: Roster

    def __post_init__(self) -> None:
        if self.roster.members.get(self.name) != self.secret.public:
            raise ConfigError(
                f"the roster has {'another key' if self.name in self.roster.members else 'no line'} for "
                f'{self.name!r}; this site\'s is {self.name} = "{self.secret.public.hex()}"'
            )

    @staticmethod
    def load(name: str, key: Path, roster: Path) -> Member:
        """Read the files that a site's operator keeps."""
        return Member(name, SecretKey.load(key), Roster.load(roster))

    def require_cohort(self, cohort: Sequence[str]) -> dict[str, bytes]:
        """Return names and public keys of the cohort, as this site knows them; or raise a Refusal."""
        if self.name not in cohort:
            raise Refusal("aggregation", f"the cohort of {len(cohort)} is without {self.name}, and so would its sum be")
        try:
            return self.roster.cohort(cohort)
        except ConfigError as error:
            raise Refusal("aggregation", str(error)) from error

    def joined(self, invitation: Invitation, cohort: Sequence[str], binding: bytes) -> Invitation:
        """Return the invitation with the session that this member masks in. The server must sum in the same session:
        with another roster, θ or terms at either end there would be no sum, and all would have paid for it."""
        members = self.require_cohort(cohort)
        try:
            session = session_of(
                *(invitation.run, invitation.attempt, members, invitation.algorithm, invitation.terms),
                *(invitation.theta, invitation.coding, invitation.noise),
            )
        except (ConfigError, PrivacyError) as error:
            raise Refusal("aggregation", str(error)) from error
        if session.binding != binding:
            raise Refusal(
                "aggregation",
                "the server's session is another than this site's: compare the digests of the rosters (`fedspa site "
                "roster`) and the versions of fedspa",
            )
        return replace(invitation, session=session)


def played_key(root: bytes, number: int) -> SecretKey:
    """Return the key of a simulated agent, for a simulation that has `root`."""
    return SecretKey(derive_key(root, "member", number))


def played_keys(root: bytes, numbers: Sequence[int]) -> dict[str, SecretKey]:
    """Return the keys of simulated agents, by name."""
    return {agent_name(number): played_key(root, number) for number in numbers}
