"""The keys of a node-config, and which values they may have. `fedspa.flower.site` says what each
is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedspa.agent.member import Member
from fedspa.data.plugin import is_plugin
from fedspa.engine.choose import device_named
from fedspa.errors import ConfigError, quoted
from fedspa.runs.sections import Data

# Whoever names one of these is an agent with records of its own, whatever process it runs in.
NEEDED = frozenset({"agent", "data", "classes", "policy", "ledger"})
KEYS = (
    *sorted(NEEDED),
    *("device", "features", "key", "model", "person", "person-records", "room", "roster", "schema", "simulation"),
    "task",
)
MOST_CLASSES = 10**6
_MOST_ROOM = 10**9  # each step draws as many numbers


def parsed(given: Mapping[str, Any]) -> dict[str, Any]:
    """A node-config with no key that means nothing, and values that Flower can hand over. A function that makes the
    records is given all keys, and may have some of its own."""
    node = dict(given)
    strange = [key for key in node if key not in KEYS]
    if strange and not is_plugin(str(node.get("data", ""))):
        raise ConfigError(f"node-config: unknown key {strange[0]}; allowed: {', '.join(sorted(KEYS))}")
    for key, value in node.items():
        if type(value) not in (str, int, float, bool):
            raise ConfigError(f"node-config: {key} is {quoted(value)}; it must be a text, a number, true or false")
    return node


def classes(node: Mapping[str, Any], task: str) -> int | None:
    """How many, where the task has classes."""
    given = node.get("classes")
    if task != "classification":
        if given is not None:
            raise ConfigError(f"node-config: classes is {given!r}; the task {task!r} has none: leave it out")
        return None
    if type(given) is not int or not 2 <= given <= MOST_CLASSES:
        raise ConfigError(
            f"node-config: classes is {'missing' if given is None else repr(given)}; it must be a whole number "
            f"from 2 to {MOST_CLASSES}, as classes=2: how many classes the run has, not how many this site "
            'happens to hold; where no classes are learned, name what is, as task="regression"'
        )
    return given


def person_records(node: Mapping[str, Any]) -> int:
    """The most records of a person that count."""
    most = node.get("person-records", Data.model_fields["person_records"].default)
    if type(most) is not int or not 1 <= most <= 100_000:
        raise ConfigError(f"node-config: person-records is {most!r}; it must be a whole number from 1 to 100000")
    return most


def room(node: Mapping[str, Any]) -> int | None:
    """For how many examples the site has room."""
    given = node.get("room")
    if given is not None and (type(given) is not int or not 1 <= given <= _MOST_ROOM):
        raise ConfigError(
            f"node-config: room is {given!r}; it must be a whole number from 1 to {_MOST_ROOM}: the most examples that "
            "this site will ever train on, a public number"
        )
    return given


def member(node: Mapping[str, Any]) -> Member | None:
    """What the site is among others, where it names a key and a roster."""
    given = {key: node[key] for key in ("key", "roster") if key in node}
    if not given:
        return None
    for key, form in (("key", "site.key"), ("roster", "roster.toml")):
        if not isinstance(given.get(key), str) or not given[key]:
            raise ConfigError(
                f"node-config: {key} is {given.get(key, 'missing')!r}; key and roster stand together, and it must be a "
                f'text, as {key}="{form}"'
            )
    return Member.load(str(node["agent"]), Path(given["key"]), Path(given["roster"]))


def device(node: Mapping[str, Any]) -> torch.device:
    """What the site trains on."""
    given = node.get("device", "cpu")
    if not isinstance(given, str):
        raise ConfigError(f'node-config: device is {given!r}; it must be a text, as device="cuda"')
    return device_named(given, "node-config: device")
