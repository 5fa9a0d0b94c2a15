"""MLflow: a run in the experiment "fedspa", at MLFLOW_TRACKING_URI or in RUN/mlflow.db. Steps are rounds, from 1."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# MLflow sends telemetry by default; a private federation must not.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.tracking import MlflowClient

from fedspa.errors import real_path
from fedspa.runs.config import Config
from fedspa.track import figures, words

EXPERIMENT = "fedspa"
_TAG = "fedspa.folder"


class MLflow:
    """A resumed run continues the MLflow run of its folder."""

    def __init__(self, config: Config, folder: Path, first_round: int) -> None:
        place = str(real_path(folder))
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place}/mlflow.db")
        known = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(EXPERIMENT)
        # A first round is a new run's, whatever was in a folder of this name before.
        runs = self._client.search_runs([experiment]) if first_round > 0 else []
        found = [run for run in runs if run.data.tags.get(_TAG) == place]
        if found:
            self._id = found[0].info.run_id
            return
        self._id = self._client.create_run(experiment, run_name=folder.name, tags={_TAG: place}).info.run_id
        for section, values in config.model_dump(exclude_none=True).items():
            for key, value in values.items():
                self._client.log_param(self._id, f"{section}.{key}", value)

    def add_round(self, metrics: Mapping[str, Any]) -> None:
        for key, value in figures(metrics).items():
            self._client.log_metric(self._id, key, value, step=metrics["round"] + 1)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for name, text in words(summary).items():
            self._client.set_tag(self._id, f"fedspa.{name}", text)
        self._client.set_terminated(self._id, "FINISHED")

    def close(self) -> None:
        """A run that was stopped stays open: it can be resumed."""


open_tracker = MLflow
