"""What a run of private statistics or of a private evaluation released, read from its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedspa.agent.participate import agent_name
from fedspa.analytics.estimates import Estimate, Numbers, estimates
from fedspa.analytics.scores import scores
from fedspa.data.columns import Schema, checked
from fedspa.errors import ConfigError
from fedspa.learning.tasks.totals import Layout, Totals, layout_of
from fedspa.runs.checkpoint import load_latest
from fedspa.runs.config import Config, load
from fedspa.runs.rundir import check_is_run, read_metrics, read_summary
from fedspa.server.coordinator import RELEASED


@dataclass(frozen=True)
class Released:
    """What a finished run released. `sites` has name, totals and the noise in each of them: first, under the name "",
    of all sites together; then of each whose upload the server saw. `schema` is None for the scores of a model."""

    config: Config
    summary: Mapping[str, Any]
    layout: Layout
    schema: Schema | None
    sites: Sequence[tuple[str, Numbers, float]]
    folder: Path

    @property
    def estimates(self) -> list[Estimate]:
        """Return every number with its 95 % interval, in the order of `sites`."""
        if self.schema is not None:
            return [
                each
                for site, totals, noise in self.sites
                for each in estimates(self.layout, self.schema, totals, noise, site, self.summary["unit"])
            ]
        return [
            replace(each, site=site)
            for site, totals, noise in self.sites
            for each in scores(self.layout, totals, noise, self.summary["unit"])
        ]


def released(folder: Path) -> Released:
    """Read what the run in `folder` released."""
    check_is_run(folder)
    config, summary = load(folder / "config.toml", own_code=False), read_summary(folder)
    if config.task.name != Totals.name:
        raise ConfigError(f"the run in {folder} trained a model; it released no statistics")
    found = load_latest(folder / "checkpoint")
    if summary is None or found is None:
        raise ConfigError(f"the run in {folder} is not finished; `fedspa run --resume {folder}` resumes it")
    uploads = sum(metrics.agents for metrics in read_metrics(folder / "metrics.jsonl"))
    if not uploads:
        raise ConfigError(f"the run in {folder} released nothing: no agent answered")
    schema = None if config.task.options.get("layout") is not None else checked(summary["schema"])
    layout = layout_of(config.task.options, schema)
    bound, noise = config.algorithm.batch, float(summary["noise_multiplier"])
    totals = {name: tensor.double().numpy() * bound for name, tensor in found.state.tensors.items()}
    sites = [("", totals["theta"] * uploads, noise * math.sqrt(uploads))]
    names = summary["agent_names"]
    for number, name in sorted((int(name.removeprefix(RELEASED)), name) for name in totals if name != "theta"):
        sites.append((agent_name(number) if names is None else names[number], totals[name], noise))
    return Released(config, summary, layout, schema, sites, folder)
