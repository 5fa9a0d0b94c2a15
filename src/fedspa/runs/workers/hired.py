"""The crew of a run, as its config asks for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import torch

from fedspa.errors import ConfigError
from fedspa.runs.checkpoint import Fact
from fedspa.runs.identity import ROUNDING, of_machine
from fedspa.runs.setup import Simulated
from fedspa.runs.workers.crew import Crew
from fedspa.runs.workers.messages import Made, packed
from fedspa.runs.workers.on_ray import RayPool

log = logging.getLogger(__name__)


@contextmanager
def hired(job: Simulated) -> Iterator[Crew]:
    """Within it, as many workers are there as `run.workers` says."""
    run = job.config.run
    gpu = torch.device(run.device).type == "cuda"
    with closing(RayPool(run.cluster, run.workers, run.threads, int(gpu))) as pool:
        made = packed(Made(pool.packed(job.make_engine), run.device, tuple(map(str, sys.path))))
        # A GPU trains all agents that it is given as one stack; a CPU one per thread.
        with closing(Crew(pool, run.workers, made, None if gpu else run.threads, alike(job))) as crew:
            yield crew


def alike(job: Simulated) -> Callable[[Mapping[str, Fact]], None]:
    """Raises where a worker would not compute what this process would. Where noise is drawn anew nobody expects the
    same bits, so what only rounds otherwise is said and not refused."""
    here = {"engine": job.engine.name, **of_machine(job.config.run.device)}
    repeated, told = job.config.privacy.noise == "seeded", set[str]()

    def check(about: Mapping[str, Fact]) -> None:
        for key, value in about.items():
            if value == here[key]:
                continue
            line = f"the {key} of a worker is {value!r}, and here it is {here[key]!r}"
            if key not in ROUNDING or repeated:
                raise ConfigError(f"{line}; make the machines of run.cluster alike in this, or leave that one out")
            if key not in told:
                log.warning("%s; its agents' updates may round otherwise", line)
                told.add(key)

    return check
