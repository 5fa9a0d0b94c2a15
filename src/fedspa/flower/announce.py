"""What the server says to one agent of one round."""

from __future__ import annotations

from flwr.app import ConfigRecord

from fedspa.algorithms import Terms
from fedspa.flower.terms import Announcement, to_record
from fedspa.learning.flat import sketch
from fedspa.runs.setup import Job
from fedspa.secagg.session import Session
from fedspa.server.coordinator import Coordinator


class Announcer:
    """Of one run: what is the same in all its rounds is the job's, the rest is where the coordinator stands."""

    def __init__(self, run: str, job: Job, coordinator: Coordinator) -> None:
        self._run, self._job, self._coordinator = run, job, coordinator
        self._constants = sketch(job.server.model.module)

    def record(self, terms: Terms, number: int, session: Session | None, cohort: tuple[str, ...] = ()) -> ConfigRecord:
        """For the agent of this number. A session has the cohort of its sum; before there is one, `cohort` names whom
        the run is offered to."""
        config, models = self._job.config, self._coordinator.models
        return to_record(
            Announcement(
                run=self._run,
                number=number,
                algorithm=config.algorithm.name,
                model=config.model.name,
                model_seed=config.run.seed.to_bytes(8, "big"),
                constants=self._constants,
                task=config.task,
                classes=self._job.server.model.task.width or 0,
                features=config.data.features or "",
                coding=self._job.server.coding,
                mask_seed=self._coordinator.mask_seed(terms, number),
                noise=None if terms.plan is None else config.privacy.noise,
                terms=terms,
                attempt=1 if session is None else session.attempt,
                scored=0 if models is None else len(models),
                cohort=cohort if session is None else tuple(session.members),
                binding=b"" if session is None else session.binding,
            )
        )
