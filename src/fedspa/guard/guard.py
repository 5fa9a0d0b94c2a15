"""The guard: nothing runs under it before its spend is on the disk.

Entries go into the agent's ledger, under the agent's cap, with those of fedspa's own runs: ε is one composition over
all that was ever spent on these records, whichever tool spent it. An entry is paid once it is written. A body that
fails, or a process that is killed, has spent. The ledger is opened for each write and closed again, so that a guard may
be used in other threads and processes.

dp_accounting's `DpEvent`s become events that the ledger stores and prices; those without a proven cost are refused by
name. A noise multiplier means the same in both: the standard deviation of the noise on a sum, over the bound on what
one record adds to it. So does a Poisson sample. A `DpEvent` has no neighbouring relation and no unit: those are the
guard's.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn, get_args

from fedspa.agent.ledger.ledger import Ledger, check_name
from fedspa.agent.policy import Policy, PolicyRefusal
from fedspa.errors import BudgetError, ConfigError, LedgerError, PrivacyError, quoted
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.budget import PrivacyBudget, Total, admits
from fedspa.privacy.event import MOST, Event, Neighbours, NoiseMode, Sampling, Unit, noise_modes, seeded_warning, shown

# Stands where an agent's own entry has the digest of its update. What a guarded body lets out is not seen here, so each
# entry counts as released from the moment that its body may run.
UNSEEN = "not seen by the guard"

_SIMPLE = 10**6  # rates with a denominator up to this are kept as they are
_FINE = 2**49  # others are rounded up to a multiple of one over this
_ACCEPTED = (
    "GaussianDpEvent, PoissonSampledDpEvent or SampledWithoutReplacementDpEvent of one, SelfComposedDpEvent and "
    "ComposedDpEvent of these"
)

Drawn = tuple[Sampling, int, int, float]  # sampling, batch, records, noise multiplier


def create(path: str | Path) -> None:
    """Make an empty ledger, once, for records on which nothing was spent yet.

    Args:
        path: Where; its anchor will lie beside it.

    Raises:
        LedgerError: There is a ledger, or what is left of one. Nothing is touched then.
    """
    path = check_path("path", path)
    if path.exists():
        raise LedgerError(f"{path} is there already; open it, or give another path for other records")
    Ledger.open(path).close()


def open(
    path: str | Path,
    *,
    agent: str,
    epsilon: float | None = None,
    delta: float | None = None,
    neighbours: Neighbours | None = None,
    unit: Unit | None = None,
    policy: Policy | str | Path | None = None,
    run: str | None = None,
) -> Guard:
    """The guard of some records: what is spent on them is written into their ledger first.

    Args:
        path: The ledger, which `create` made. One that went missing is an error and no fresh budget.
        agent: The name that the ledger knows the records by.
        epsilon: The most that all runs together may ever cost, at `delta`.
        delta: Below one over the number of records.
        neighbours: The neighbouring relation of every ε, `add-remove` (the default) or `replace-one`.
        unit: What is protected, each `record` (the default) or each `person`.
        policy: In place of `epsilon`, `delta` and `neighbours`: a policy, or its file. Its other limits then hold too.
        run: A name for readers of the ledger; default: a random one.

    Returns:
        The guard. It holds no file open.

    Raises:
        LedgerError: The ledger is missing, damaged or behind its anchor, or knows the records by another name.

    Examples:
        >>> import fedspa
        >>> from dp_accounting import GaussianDpEvent
        >>> fedspa.guard.create("ledger.sqlite")
        >>> guard = fedspa.guard.open("ledger.sqlite", agent="clinic", epsilon=1.0, delta=1e-5)
        >>> with guard.spend(GaussianDpEvent(10.0)):
        ...     pass  # train
        >>> print(f"{guard.total().epsilon:.3f}")
        0.341
        >>> guard.require(GaussianDpEvent(10.0), participations=20)
        Traceback (most recent call last):
        ...
        fedspa.errors.BudgetError: agent 'clinic' has ε = 0.659 left...
    """
    if policy is not None:
        if (epsilon, delta, neighbours) != (None, None, None):
            raise ConfigError("a policy states epsilon, delta and neighbours itself; give them or the policy, not both")
        policy = policy if isinstance(policy, Policy) else Policy.load(check_path("policy", policy))
        cap = policy.cap
        unit = unit or policy.unit
    else:
        if epsilon is None or delta is None:
            raise ConfigError("a guard needs epsilon and delta, the most that all runs may ever cost, or a policy")
        cap = PrivacyBudget(check_number("epsilon", epsilon), check_number("delta", delta), neighbours or "add-remove")
    if unit not in (None, *get_args(Unit)):
        raise ConfigError(f"unit is {unit!r}; allowed: {', '.join(get_args(Unit))}")
    check_name("agent", agent)
    if run is not None:
        check_name("run", run)
    path = check_path("path", path)
    if not path.exists():
        raise LedgerError(
            f"{path} is missing; make the ledger once by fedspa.guard.create, before anything is spent on the records; "
            "if it was there before, restore it"
        )
    with Ledger.open(path, create=False) as ledger:
        identity = ledger.name
    drawn = f"{datetime.now(UTC):%Y-%m-%d}-{secrets.token_hex(4)}"
    guard = Guard(path.absolute(), identity, agent, cap, unit or "record", run or drawn, policy)
    with guard.opened():
        return guard


@dataclass(frozen=True)
class Guard:
    """What `open` gives. `ledger` is the name that the ledger drew when it was made."""

    path: Path
    ledger: str
    agent: str
    cap: PrivacyBudget
    unit: Unit
    run: str
    policy: Policy | None = None

    def spend(
        self, event: object, *, announced: int = 1, noise: NoiseMode | None = None, message: str | None = None
    ) -> AbstractContextManager[None]:
        """Pay for `event`, on the disk, and only then run the body; or refuse, and do not run it.

        It is the call that pays: where `with` was forgotten, what comes after it is paid for all the same.

        Args:
            event: What the body does to the records: an event of fedspa's, or of dp_accounting's.
            announced: How often this event is planned in all. With the first spend ever on these records it makes that
                plan the one that PLD prices as a whole (docs/accounting.md). Later it has no effect.
            noise: Where the body's noise comes from, `secure`, `exact` or `seeded`; it counts as unrecorded if nothing
                is said.
            message: A name for the spend, which is paid for once and refused ever after.

        Raises:
            BudgetError: The cap would be exceeded.
            PrivacyError: The event has no proven privacy cost.
            PolicyRefusal: The event is laxer than the guard's policy.
        """
        self.pay(event, announced=announced, noise=noise, message=message)
        return _Body()

    def optimizer(self, optimizer: Any, data_loader: Any, *, epochs: int, block: int | None = None) -> Any:
        """An optimiser of Opacus's that pays before it steps.

        Args:
            optimizer: What `make_private` returned.
            data_loader: What `make_private` returned with it.
            epochs: How many blocks are announced. A run whose cap does not cover all of them is refused here.
            block: How many steps are paid for at a time, each time whole; an epoch if nothing is said.

        Returns:
            The same object.

        Raises:
            PrivacyError: No event with a proven cost can be derived from the two.
            BudgetError: The cap would be exceeded. A later `optimizer.step()` raises it too.
        """
        from fedspa.guard.opacus import watch

        return watch(self, optimizer, data_loader, epochs=epochs, block=block)

    def require(self, event: object, *, participations: int = 1, noise: NoiseMode | None = None) -> None:
        """Ask without paying.

        Args:
            event: As of `spend`.
            participations: How often.
            noise: As of `spend`.

        Raises:
            BudgetError: All of them together would exceed the cap.
        """
        check_count("participations", participations)
        events = self._events(event, noise)
        for own in events:
            self._check(own, participations)
        with self.opened() as ledger:
            if len(events) == 1:
                ledger.require(self.agent, events[0], self.cap, participations=participations)
                return
            after = Counter(ledger.spent(self.agent)) + Counter(dict.fromkeys(events, participations))
            if not admits(after, self.cap, ledger.first_plan(self.agent)):
                raise BudgetError(
                    f"agent {self.agent!r} cannot afford {participations} spends of {len(events)} mechanisms under "
                    f"its cap {self.cap.epsilon:g} (δ = {self.cap.delta:g}, {self.cap.neighbours}); ask for less"
                )

    def pay(
        self,
        event: object,
        *,
        announced: int = 1,
        noise: NoiseMode | None = None,
        tool: str = "guard",
        run: str | None = None,
        message: str | None = None,
    ) -> None:
        """Write `event` into the ledger, durably: what it pays for may run once this has returned.

        Args:
            event: As of `spend`, which is this with a body.
            announced: As of `spend`.
            noise: As of `spend`.
            tool: What spends; it stands before the run's name in the ledger.
            run: The run's name; the guard's own if none is given.
            message: As of `spend`.
        """
        check_count("announced", announced)
        events = self._events(event, noise)
        message = message or secrets.token_hex(8)
        run = f"{tool}:{run or self.run}"
        # The first has the name itself, so that a name is taken whether it paid for one mechanism or for several.
        named = {message if i == 1 else f"{message}/{i}": own for i, own in enumerate(events, 1)}
        with self.opened() as ledger:
            if len(events) == 1:  # evaluates ε before the lock is taken
                ledger.would_exceed(self.agent, events[0], self.cap, announced=announced)
            with ledger.transaction():
                ledger.require_known(self.agent)
                if ledger.find(self.agent, run, message) is not None:
                    raise LedgerError(
                        f"agent {self.agent!r}, run {run!r}, message {message!r} was paid for before, and may have "
                        "run: each entry covers one execution; use a new message name, which is a new spend"
                    )
                done = ledger.participations(self.agent, run)
                for i, own in enumerate(events, 1):
                    self._check(own, done + i)
                for name, own in named.items():
                    plan = announced if len(events) == 1 else None
                    ledger.reserve(self.agent, own, run, name, cap=self.cap, announced=plan)
                    ledger.release(self.agent, run, name, UNSEEN)

    def total(self) -> Total:
        """Return what all that was ever spent on these records costs.

        Returns:
            `epsilon` at the cap's δ and relation, and `by`, what shows it; with that, what `ledger accept-loss` took as
            lost, which no ε counts.
        """
        with self.opened() as ledger:
            epsilon, by = self.cap.limits[0].total(ledger.spent(self.agent), ledger.first_plan(self.agent))
            return Total(epsilon, "; ".join((by, *map(str, ledger.losses()))))

    def __str__(self) -> str:
        with self.opened() as ledger:
            spent = ledger.spent(self.agent)
            total = self.cap.limits[0].total(spent, ledger.first_plan(self.agent))
            lost = ledger.losses()
        what = (
            f"agent {self.agent!r}: ε = {shown(total.epsilon)} of {self.cap.epsilon:g} spent in {sum(spent.values())} "
            f"entries, for each {self.unit} (δ = {self.cap.delta:g}, {self.cap.neighbours}, {total.by})"
        )
        return "; ".join(filter(None, (what, seeded_warning(noise_modes(spent)), *map(str, lost))))

    @contextmanager
    def opened(self) -> Iterator[Ledger]:
        """The ledger, where it still is the one that the guard was opened on and knows these records by this name."""
        with Ledger.open(self.path, create=False) as ledger:
            if ledger.name != self.ledger:
                raise LedgerError(
                    f"{self.path} is another ledger than the one that this guard was opened on; put that one back"
                )
            ledger.require_known(self.agent)
            yield ledger

    def _events(self, event: object, noise: NoiseMode | None) -> list[Event]:
        return events_of(event, neighbours=self.cap.neighbours, unit=self.unit, noise=noise)

    def _check(self, event: Event, participations: int) -> None:
        """Raise a PolicyRefusal if so many entries in one run are laxer than the policy, its budget aside. Foreign
        training releases whole models, clipped to a given norm."""
        if self.policy is None:
            return
        if not isinstance(event, GaussianEvent):
            raise PolicyRefusal("noise-too-small", f"no noise multiplier is known of {event}")
        for refusal in self.policy.limit_violations(event.unit, event.noise_multiplier, event.steps, participations):
            raise PolicyRefusal(*refusal)


class _Body:
    """One run of a `with` block, which was paid for. What was paid for belongs to the process that paid."""

    def __init__(self) -> None:
        self._left = [os.getpid()]

    def __enter__(self) -> None:
        try:
            process = self._left.pop()  # of two threads, one gets it
        except IndexError:
            process = None
        if process is None:
            raise LedgerError("this spend was used: each covers one execution; call guard.spend for each")
        if process != os.getpid():
            raise LedgerError("this spend belongs to another process; call guard.spend in this one")

    def __exit__(self, *_: object) -> None:
        return None

    def __reduce__(self) -> NoReturn:
        """A copy would run what was paid for once more."""
        raise LedgerError("a spend cannot be copied or pickled: it covers one execution; call guard.spend for each")

    def __call__(self, function: object) -> NoReturn:
        raise ConfigError("guard.spend covers one `with` block; write `with guard.spend(event):` in the function")


def events_of(
    given: object, *, neighbours: Neighbours, unit: Unit = "record", noise: NoiseMode | None = None
) -> list[Event]:
    """Return the events of the ledger that `given` is, none where it releases nothing."""
    found = [_own(given, unit, noise)] if isinstance(given, Event) else _foreign(given, unit, noise)
    for event in found:
        if event.sampling == "fixed" and neighbours == "add-remove":
            raise PrivacyError(
                "batches of a fixed size have no proven privacy cost under 'add-remove'; open the guard with "
                "neighbours='replace-one', or sample by Poisson"
            )
    return found


def fraction_of(rate: float) -> Fraction:
    """A sampling rate as batch over records: the number itself where it is a simple fraction, else a little more."""
    if not (isinstance(rate, Real) and 0 < rate <= 1):
        raise PrivacyError(f"the sampling probability is {quoted(rate)}; it must be above 0 and at most 1")
    simple = Fraction(rate).limit_denominator(_SIMPLE)
    return simple if float(simple) == rate else Fraction(math.ceil(Fraction(rate) * _FINE), _FINE)


def _own(event: Event, unit: Unit, noise: NoiseMode | None) -> Event:
    if event.unit != unit:
        raise PrivacyError(
            f"the event protects each {event.unit} and the guard each {unit}; their ε do not add up (docs/privacy.md)"
        )
    if noise is not None and event.noise not in (None, noise):
        raise PrivacyError(f"noise is {noise!r}, and the event says {event.noise!r}: give one of them")
    return event if noise is None else event.with_noise(noise)


def _foreign(given: object, unit: Unit, noise: NoiseMode | None) -> list[Event]:
    steps: dict[Drawn, int] = {}  # those that differ in their number only are one event
    for drawn, count in _parts(given, 1):
        steps[drawn] = steps.get(drawn, 0) + count
    return [
        GaussianEvent(sampling, batch, records, count, multiplier, noise=noise, unit=unit)
        for (sampling, batch, records, multiplier), count in steps.items()
    ]


def _parts(given: Any, times: int) -> Iterator[tuple[Drawn, int]]:
    from dp_accounting import dp_event

    kind = type(given)
    if times == 0 or kind is dp_event.NoOpDpEvent:
        return
    if kind is dp_event.ComposedDpEvent:
        for part in given.events:
            yield from _parts(part, times)
    elif kind is dp_event.SelfComposedDpEvent:
        if not (isinstance(given.count, int) and given.count >= 0):
            raise PrivacyError(f"SelfComposedDpEvent has count {quoted(given.count)}; it must be a whole number")
        yield from _parts(given.event, times * given.count)
    elif kind is dp_event.GaussianDpEvent:
        yield ("poisson", 1, 1, _multiplier(given)), times
    elif kind is dp_event.PoissonSampledDpEvent and type(given.event) is dp_event.GaussianDpEvent:
        if given.sampling_probability != 0:
            rate = fraction_of(given.sampling_probability)
            yield ("poisson", rate.numerator, rate.denominator, _multiplier(given.event)), times
    elif kind is dp_event.SampledWithoutReplacementDpEvent and type(given.event) is dp_event.GaussianDpEvent:
        yield ("fixed", given.sample_size, given.source_dataset_size, _multiplier(given.event)), times
    else:
        raise PrivacyError(_refusal(given, isinstance(given, dp_event.DpEvent)))


def _multiplier(gaussian: Any) -> float:
    try:
        return float(gaussian.noise_multiplier)
    except (TypeError, ValueError, OverflowError):
        raise PrivacyError(
            f"the noise multiplier is {quoted(gaussian.noise_multiplier)}; it must be a number"
        ) from None


def _refusal(given: Any, is_event: bool) -> str:
    name = type(given).__name__
    if not is_event:
        return f"{quoted(given)} is no event; give one of fedspa's or of dp_accounting's ({_ACCEPTED})"
    if hasattr(given, "event"):
        name = f"{name} of {type(given.event).__name__}"
    return f"{name} cannot be spent: no proven accountant for it is available; accepted: {_ACCEPTED}"


def check_path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise ConfigError(f"{name} is {quoted(value)}; give the path of a file")
    return Path(value)


def check_number(name: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigError(f"{name} is {quoted(value)}; it must be a number")
    return float(value)


def check_count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MOST:
        raise ConfigError(f"{name} is {quoted(value)}; it must be a whole number of at least 1, and at most {MOST:g}")
