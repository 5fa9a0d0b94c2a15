"""A mod for Flower's ClientApps: the site pays before its app trains, whatever strategy the server runs.

What a server learns of a refusal is one of `REASONS`, by its code. The text beside it in the site's own log tells what
was spent, and that is nobody else's business. Nor does the text of an app's exception travel, or a metric that nobody
said is paid for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fedspa.agent.policy import PolicyRefusal
from fedspa.errors import BudgetError, ConfigError, FedspaError, quoted
from fedspa.guard.guard import Guard, check_count, events_of, open
from fedspa.privacy.event import Event, NoiseMode

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp.typing import ClientAppCallable, Mod

logger = logging.getLogger("fedspa.guard")

_COUNTS = ("num-examples", "num_examples")  # how many records a site holds is taken to be public
REASONS = {
    "budget": "this site's privacy budget does not cover the round; plan fewer rounds, or more noise",
    "policy": "the round is laxer than this site's policy; ask its operator for the policy",
    "not-paid": "messages of this type would release what nothing paid for; the site answers those it has an event for",
    "stale": "the message is older than its time to live; send it anew",
    "refused": "the site cannot take part now; its operator finds why in the log",
    "failed": "the site's app failed; its operator finds why in the log",
}


def flower_mod(
    event: object,
    *,
    rounds: int = 1,
    evaluate: object | None = None,
    metrics: Iterable[str] = (),
    free: Iterable[str] = (),
    noise: NoiseMode | None = None,
    guard: Callable[[Context], Guard] | None = None,
) -> Mod:
    """A mod for a whole ClientApp, `ClientApp(..., mods=[flower_mod(event, rounds=10)])`, that pays before it trains.

    Messages of other types than `train` are refused unless something is said of them here: metrics on private records
    are releases too.

    Args:
        event: What one answer to a `train` message does to the site's records: an event of fedspa's or of
            dp_accounting's, or a function of (message, context) that gives one.
        rounds: How many are announced with the site's first.
        evaluate: The event that pays for all of an answer to an `evaluate` message.
        metrics: Names of metrics that `event` covers. Beside its arrays a reply to `train` has those and the number of
            examples; others are taken out.
        free: Types of messages that read no record at all.
        noise: Where the app's noise comes from, as of `Guard.spend`.
        guard: Opens the site's guard. If it is not given, `agent`, `ledger` and `policy` of the node-config say which
            it is: the site's own words, not the server's.

    Returns:
        The mod.
    """
    check_count("rounds", rounds)
    kept, unpaid = _texts("metrics", metrics), _texts("free", free)
    for one in (event, *(() if evaluate is None else (evaluate,))):
        if not callable(one) and not isinstance(one, Event):
            events_of(one, neighbours="replace-one", noise=noise)  # under which every sound event has a price
    paid = {"train": event, **({} if evaluate is None else {"evaluate": evaluate})}
    if both := sorted(unpaid & paid.keys()):
        raise ConfigError(f"free has {', '.join(both)}, which an event pays for; leave it out of free")

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type
        if kind in unpaid:
            return call_next(message, context)
        try:
            _pay(message, context, paid.get(kind.partition(".")[0]), rounds, noise, guard or _of_node)
            reply = call_next(message, context)
            if reply.has_error():
                return _error(message, "failed", RuntimeError(reply.error.reason))
            if kind.partition(".")[0] == "train":
                _keep(reply, kept)
        except _Refused as refused:
            return _error(message, refused.code, refused.__cause__ or refused)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # one that escaped would carry its text to the server
            return _error(message, "failed", error)
        return reply

    return mod


def _texts(name: str, value: Iterable[str]) -> frozenset[str]:
    """Return the texts of a list. A lone text would be taken for its letters, which nobody means."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} is {quoted(value)}; give a list of names, as [{quoted(value)}]")
    return frozenset(value)


class _Refused(Exception):
    def __init__(self, code: str, text: str = "") -> None:
        super().__init__(text or REASONS[code])
        self.code = code


def _pay(
    message: Message,
    context: Context,
    event: object | None,
    rounds: int,
    noise: NoiseMode | None,
    guard: Callable[[Context], Guard],
) -> None:
    metadata = message.metadata
    if event is None:
        raise _Refused("not-paid", f"a message of type {metadata.message_type!r}, for which no event was given")
    if time.time() > metadata.created_at + metadata.ttl:
        raise _Refused("stale")
    try:
        if callable(event) and not isinstance(event, Event):
            event = event(message, context)
        # A message that comes again under its old name was answered, or its round was lost: it is not trained again.
        guard(context).pay(
            event,
            announced=rounds,
            noise=noise,
            tool="flower",
            run=str(metadata.run_id),
            message=metadata.message_id or None,
        )
    except BudgetError as error:
        raise _Refused("budget") from error
    except PolicyRefusal as error:
        raise _Refused("budget" if error.code == "budget" else "policy") from error
    except FedspaError as error:
        raise _Refused("refused") from error


def _of_node(context: Context) -> Guard:
    node = context.node_config
    missing = [key for key in ("agent", "ledger", "policy") if not isinstance(node.get(key), str)]
    if missing:
        raise ConfigError(
            f"node-config: {', '.join(missing)} missing; a guarded site names its records, its ledger and its policy, "
            'as agent="north" ledger="ledger.sqlite" policy="policy.toml"'
        )
    return open(str(node["ledger"]), agent=str(node["agent"]), policy=str(node["policy"]))


def _error(message: Message, code: str, why: BaseException) -> Message:
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

    logger.warning("refused (%s): %s", code, why, exc_info=why if code == "failed" else None)
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, f"fedspa ({code}): {REASONS[code]}"), reply_to=message)


def _keep(reply: Message, names: frozenset[str]) -> None:
    """Take out of a reply what nothing paid for. A count is one whole number: a list of them could be anything."""
    records: Any = reply.content
    for place, record in [*records.metric_records.items(), *records.config_records.items()]:
        status = place == "fitres.status"  # Flower's older clients say by a code whether they are well
        free = ("code",) if status else _COUNTS
        for name, value in [*record.items()]:
            if not (name in free and type(value) is int) and (status or name not in names):
                del record[name]
        if status and place in records.config_records:
            record["message"] = ""  # the text is their own, and Flower's server looks for one
