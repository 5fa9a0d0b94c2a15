"""What a simulation goes on from: the newest whole checkpoint in its folder, held against the run that asks for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from fedspa.mechanisms import event_of
from fedspa.runs.books import refuse_another_event
from fedspa.runs.checkpoint import Checkpoint, CheckpointError, Fact, load_latest
from fedspa.runs.config import Config
from fedspa.runs.folder import RunFolder
from fedspa.runs.identity import ALL_RECORDS, PACKAGE, ROUNDING, TOLD
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.plans import flat
from fedspa.runs.setup import Job
from fedspa.server.coordinator import Coordinator

log = logging.getLogger(__name__)

# Where the files lie, how many there are and who else trains decides nothing about a run.
_FREE_KEYS = frozenset(
    {"run.out", "run.code", "run.checkpoint_every", "run.keep", "run.track", "run.workers", "run.cluster"}
)


def saved(folder: RunFolder, config: Config, facts: Mapping[str, Fact]) -> Checkpoint | None:
    """The checkpoint to go on from; None where the run was interrupted before anything could be spent."""
    found = load_latest(folder.checkpoints)
    if found is None and folder.started():
        raise CheckpointError(f"{folder.path} holds a run that has begun but no checkpoint; restore one from a backup")
    if found is None:
        return None
    for line in found.damaged:
        log.warning("%s; going on from the checkpoint before it", line)
    refuse_differences(folder.checkpoints, found, config, facts)
    return found


def refuse_differences(folder: Path, checkpoint: Checkpoint, config: Config, facts: Mapping[str, Fact]) -> None:
    """A resumed run must be the same run: name everything in which it would not be.

    Where noise is drawn anew nobody expects the same bits, so what only rounds otherwise is said and not refused.
    """
    then, now = flat(checkpoint.config), flat(config)
    # Where the digests of all records are known, they decide, wherever the files lie.
    free = _FREE_KEYS | {"data.dir"} if ALL_RECORDS in facts else _FREE_KEYS
    differences = [
        f"{key} was {_shown(then.get(key))} and is {_shown(now.get(key))}"
        for key in sorted(then.keys() | now.keys())
        if key not in free and then.get(key) != now.get(key)
    ]
    repeated = config.privacy.noise == "seeded"
    for key, after in facts.items():
        before = checkpoint.facts.get(key)
        if key in TOLD or before == after:
            continue
        hidden = key.startswith("digest")  # nothing to read in one, and those of records are for no log
        line = f"the {key} is another" if hidden else f"the {key} was {_shown(before)} and is {_shown(after)}"
        if key in {*ROUNDING, PACKAGE} and not repeated:
            log.warning("%s since the run began; the rounds from here on may round otherwise", line)
        else:
            differences.append(line)
    if differences:
        raise CheckpointError(
            f"the checkpoint in {folder} belongs to another run: {'; '.join(differences)}; resume with what the run "
            "was started with, or start a new run"
        )


def refuse_other_scores(server: Coordinator, done: list[RoundMetrics], config: Config, folder: Path) -> None:
    """The module at the checkpoint's parameters must score what it scored then: whatever of its code no digest found
    would show here."""
    if not done:
        return
    (scores, loss), last = server.evaluate(), done[-1]
    if last.scores and scores.keys() != last.scores.keys():
        raise CheckpointError(
            f"the run in {folder} has the scores {', '.join(last.scores)}, and would go on with {', '.join(scores)}: "
            "give it the metrics that it was started with"
        )
    exact = config.privacy.noise == "seeded" and config.run.device == "cpu"
    if (scores, loss) == (last.scores, last.loss):
        return
    if exact or not math.isclose(loss, last.loss, rel_tol=1e-3, abs_tol=1e-6):
        raise CheckpointError(
            f"the model in {folder} had a loss of {last.loss:.9g}{_told(last.scores)} after round {last.round + 1}, "
            f"and now has {loss:.9g}{_told(scores)} with the same parameters: the code of its task, of its "
            "module or of its features is another; resume with what the run was started with, or start a new run"
        )


def _told(scores: Mapping[str, float | None]) -> str:
    return "".join(f", {name} {value:.6g}" for name, value in scores.items() if value is not None)


def noise(job: Job) -> dict[str, str]:
    """What a checkpoint says of it where no ledger does: a server's agents keep theirs to themselves."""
    return {} if job.plan is None else {"event": job.plan.event.to_json()}


def refuse_other_noise(checkpoint: Checkpoint, job: Job) -> None:
    """Raise where the rounds of the checkpoint did not have the noise that the job would go on with."""
    if job.plan is not None:
        refuse_another_event(event_of(checkpoint.extra["event"]), job.plan.event)


def _shown(value: object) -> str:
    return "unset" if value is None else repr(value)
