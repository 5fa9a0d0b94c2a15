"""The search within a run: what was tried, what that spent, and what was chosen. From files that anyone may have
edited: what is not of its type is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedspa.errors import ConfigError
from fedspa.report.read import RunRecord
from fedspa.runs.config import Config
from fedspa.runs.halving import settled
from fedspa.runs.metrics import AGENTS_SCORE, LOWER, heading, shown_score
from fedspa.runs.statement import shown

_MOST = 12  # rehearsals that are shown, of the best


@dataclass(frozen=True, slots=True)
class Search:
    """Tables with their headers; `spent` and `test` are sentences."""

    header: list[str]
    trials: list[list[str]]
    spent: str
    rehearsed: list[list[str]]
    free: str
    test: str


def chosen(config: Config | None, summary: Mapping[str, Any] | None) -> Config | None:
    """The config with the settings that the search chose: those that the model was trained with."""
    tuning = None if summary is None else summary.get("tuning")
    if config is None or config.tuning.candidates is None or not isinstance(tuning, dict):
        return config
    choice = tuning.get("choice")
    if not isinstance(choice, int) or not 0 <= choice < len(config.tuning.candidates):
        return config
    try:
        return settled(config, config.tuning.candidates[choice]).model_copy(update={"tuning": config.tuning})
    except ConfigError:
        return config


def search(run: RunRecord) -> Search | None:
    """None where the run has no trials, or is not done."""
    found = None if run.summary is None else run.summary.get("tuning")
    if not isinstance(found, dict) or not isinstance(found.get("trials"), list):
        return None
    name, asked = run.headline, found.get("scored_by") == "agents"
    rows, taken = [], 0
    for number, trial in enumerate(found["trials"]):
        if not isinstance(trial, dict) or not isinstance(trial.get("rounds"), list):
            return None
        rounds = [t for t in trial["rounds"] if isinstance(t, int) and 0 <= t < len(run.metrics)]
        taken += len(rounds)
        told = _numbers(trial.get("scores")) if asked else [run.scores[t] for t in rounds]
        scores = " → ".join(shown_score(AGENTS_SCORE if asked else name, score) for score in told) or "–"
        uploads = sum(run.metrics[t].agents for t in rounds)
        mark = "chosen" if number == found.get("choice") else f"trial {number + 1}"
        rows.append([mark, _words(trial.get("settings")), ", ".join(str(t + 1) for t in rounds), scores, str(uploads)])
    scored = _scored(run, found.get("scoring")) if asked else []
    return Search(
        ["", "Settings", "Rounds", f"{heading(AGENTS_SCORE if asked else name)} after each", "Uploads"],
        rows + scored,
        _spent(run, taken + sum(row[2].count(",") + 1 for row in scored)),
        *_free(found.get("rehearsal"), name),
        _test(found.get("test"), name),
    )


def _scored(run: RunRecord, found: object) -> list[list[str]]:
    """A row on the rounds in which agents scored and nobody trained."""
    listed = found.get("rounds") if isinstance(found, dict) else None
    rounds = [t for t in listed if isinstance(t, int) and 0 <= t < len(run.metrics)] if isinstance(listed, list) else []
    if not rounds or not isinstance(found, dict):
        return []
    noise = " → ".join("–" if each is None else f"± {each:.2%}" for each in _numbers(found.get("deviation")))
    words = "agents score all that are left; each score has noise of this deviation"
    uploads = sum(run.metrics[t].agents for t in rounds)
    return [["scores", words, ", ".join(str(t + 1) for t in rounds), noise or "–", str(uploads)]]


def _numbers(found: object) -> list[float | None]:
    """Those of a list; None for all else in it."""
    listed = found if isinstance(found, list) else []
    return [float(each) if isinstance(each, int | float) and math.isfinite(each) else None for each in listed]


def _spent(run: RunRecord, taken: int) -> str:
    words = f"The search took {taken} of {len(run.metrics)} rounds."
    after, end = (run.metrics[t].epsilon if taken else None for t in (taken - 1, -1))
    if after is not None and end is not None:
        flaw = "" if run.metrics[-1].private else " (no guarantee: see the top)"
        words += (
            f" After it the agent that spent most stood at ε = {shown(after)}, and at the end at {shown(end)}{flaw}, "
            "trials included: each was in the ledger before it ran."
        )
    return words + " The model that was chosen trained on from where its trial had brought it."


def _free(found: object, name: str) -> tuple[list[list[str]], str]:
    """What was rehearsed, and where settings came from that nobody paid for in this run."""
    rows, words = _rehearsed(found, name)
    study = found.get("study") if isinstance(found, dict) else None
    if not isinstance(study, dict):
        return rows, words
    about = study.get("about")
    where = about.get("data") if isinstance(about, dict) else None
    return rows, (
        f"{words} Settings of an earlier search on {where or 'data without a name'} were tried first. This run's ε "
        f"does not count what that search cost, which was: {study.get('guarantee')}."
    )


def _rehearsed(found: object, name: str) -> tuple[list[list[str]], str]:
    listed = found.get("found") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(listed, list) or not listed:
        return [], "No settings were rehearsed."
    rows = [(each.get("score"), _words(each.get("settings"))) for each in listed if isinstance(each, dict)]
    known = [(float(score), settings) for score, settings in rows if isinstance(score, int | float)]
    known.sort(reverse=name not in LOWER)
    source = found.get("public")
    where = "the server's own held-out records, which are no agent's"
    if source != "holdout":
        where = f"the records {source}, which whoever ran this called public"
    free = (
        f"{len(rows)} settings were rehearsed on {where}, under the noise of this run, and that is in no ledger. "
        f"{len(rows) - len(known)} diverged."
    )
    return [[settings, shown_score(name, score)] for score, settings in known[:_MOST]], free


def _test(found: object, name: str) -> str:
    value = found.get(name) if isinstance(found, dict) else None
    if not isinstance(value, int | float):
        return ""
    return f"{heading(name)} on the test records, which chose nothing: {shown_score(name, float(value))}."


def _words(settings: object) -> str:
    if not isinstance(settings, dict) or not settings:
        return "the config's own"
    return ", ".join(f"{str(key).partition('.')[2]} {value}" for key, value in settings.items())
