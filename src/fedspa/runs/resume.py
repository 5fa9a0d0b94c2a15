"""What a simulation goes on from: the newest whole checkpoint in its folder, held against the run that asks for it."""

from __future__ import annotations

import logging
import zlib
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from fedspa.privacy.event import from_json
from fedspa.runs.books import refuse_another_event
from fedspa.runs.checkpoint import Checkpoint, CheckpointError, Fact, load_latest
from fedspa.runs.folder import RunFolder
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.setup import Job

log = logging.getLogger(__name__)


def facts(job: Job) -> dict[str, Fact]:
    """What decides a run beside its config: data files may have changed, and an engine may not be there any more."""
    labels = zlib.crc32(job.data.test_y.numpy().tobytes(), zlib.crc32(job.data.train_y.numpy().tobytes()))
    return {
        "engine": job.engine.name,
        "number of parameters": job.model.dimension,
        "number of training records": len(job.data.train_y),
        "checksum of the labels": labels,
    }


def saved(folder: RunFolder, job: Job) -> Checkpoint | None:
    """The checkpoint to go on from; None where the run was interrupted before anything could be spent."""
    found = load_latest(folder.checkpoints, job.config, facts(job))
    if found is None and folder.started():
        raise CheckpointError(f"{folder.path} holds a run that has begun but no checkpoint; restore one from a backup")
    for line in found.damaged if found is not None else ():
        log.warning("%s; going on from the checkpoint before it", line)
    return found


def noise(job: Job) -> dict[str, str]:
    """What a checkpoint says of it where no ledger does: a server's agents keep theirs to themselves."""
    return {} if job.plan is None else {"event": job.plan.event.to_json()}


def refuse_other_noise(checkpoint: Checkpoint, job: Job) -> None:
    """Raise where the rounds of the checkpoint did not have the noise that the job would go on with."""
    if job.plan is None:
        return
    if "event" not in checkpoint.extra:
        raise CheckpointError(
            "the checkpoint is of an older fedspa and does not say what noise its rounds had; finish the run with the "
            "version that began it, or start a new run"
        )
    refuse_another_event(from_json(checkpoint.extra["event"]), job.plan.event)


def history(checkpoint: Checkpoint) -> list[RoundMetrics]:
    """The metrics of the rounds that are done."""
    try:
        lines = TypeAdapter(list[RoundMetrics]).validate_python(checkpoint.metrics)
    except ValidationError:
        lines = []
    if [asdict(line) for line in lines] != checkpoint.metrics or len(lines) != checkpoint.state.round:
        raise CheckpointError("the checkpoint's metrics are not those of its rounds; restore one from a backup")
    return lines
