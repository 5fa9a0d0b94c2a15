"""Settings that nobody made, by arithmetic from public numbers: agents, records of the smallest one, and parameters.

Every record in every step has the least noise for an ε, however many steps there are: a few in each round cost no
upload. While gradients are clipped only clip × rate matters, and on a share p of the coordinates a gradient is √p as
long. So one number is left to choose: how far the model may move in the whole run. It is as far as noise may move it,
by the ratio of noise to signal, within a limit. A step has a limit, too, beyond which training diverges. Where agents
take one step in a round, as under secure aggregation, such steps may not get far enough; the server then has as much
momentum as it takes. No record is looked at.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

from fedspa.mechanisms import Plan
from fedspa.mechanisms.discrete_gaussian.plan import DISCRETE_GAUSSIAN
from fedspa.mechanisms.gaussian.plan import GAUSSIAN
from fedspa.runs.config import Config, algorithm_of, flat
from fedspa.runs.halving import Settings

CLIP = 1.0  # of the whole gradient: it bounds what a record weighs, and hardly shortens what a trained model has
EMA = 0.8
FOLLOWING = (
    *("algorithm.batch", "algorithm.local_steps", "algorithm.local_lr", "algorithm.server", "algorithm.server_lr"),
    *("algorithm.ema", "privacy.clip_value"),
)
# Why a key has the value that the run chose (run.chosen).
WHY = {
    "federation.agents": "as many as the data comes with",
    "algorithm.batch": "all that the smallest agent holds: the least noise for an ε",
    "algorithm.local_steps": "more steps at the same noise in all, and without uploads",
    "algorithm.local_lr": "as far as noise may move the model in the whole run, over all its steps",
    "algorithm.server": "a mean of updates hides what is left of the noise; momentum where its steps are too few",
    "algorithm.server_options.beta1": "the least momentum by which the steps get far enough",
    "algorithm.server_lr": "the agents' step sizes have the whole length",
    "algorithm.ema": "an average of the last models has less noise than the last",
    "privacy.clip_value": "bounds what one example weighs, and hardly shortens gradients of a trained model",
}
# How far θ may move in the whole run, were all its steps in one direction, and how far by noise. A score of a class
# may be any number, and bears more of both than a number in its own unit. By measurement (docs/tuning.md).
OF_CLASSES, OF_NUMBERS = (500.0, 10.0), (25.0, 1.0)
LARGEST_STEP = 5.0
MOMENTA = (0.0, 0.5, 0.75, 0.9)
LOCAL_STEPS = 5


def walk_of(
    rounds: float, local_steps: int, local_lr: float, server_lr: float, compression: float, clip_norm: float
) -> float:
    """Return the farthest that θ can get by the mean of clipped gradients, of norm `clip_norm` on a share p of it.
    `rounds` count as `rounds_with` momentum says."""
    return rounds * local_steps * local_lr * server_lr * math.sqrt(compression) * clip_norm


def rounds_with(momentum: float, rounds: int) -> float:
    """Return how many equal updates momentum makes of one in each round: a round's update counts 1 + β + β² + … up to
    the last round."""
    return sum((rounds - number) * momentum**number for number in range(rounds))


def noise_to_signal(noise: float, dimension: int, batch: int, uploads: int, local_steps: int) -> float:
    """Norm of all the run's noise over that of its signal if all gradients align. The same for every p."""
    return noise * math.sqrt(dimension) / (batch * math.sqrt(uploads * local_steps))


def first_settings(
    plan: Plan,
    rounds: int,
    per_round: int,
    local_lr: float,
    *,
    classes: bool,
    clip_value: float | None = None,
    momenta: Sequence[float] = MOMENTA,
) -> Settings:
    """Return clip, rate and average of the rule above, for a plan whose event is fixed. `classes`: whether classes are
    learned, whose scores may be any number. `momenta`: what the server may have where agents take one step in a round,
    the least first."""
    ratio = noise_to_signal(plan.noise_multiplier, plan.dimension, plan.batch, rounds * per_round, plan.local_steps)
    farthest, noise = OF_CLASSES if classes else OF_NUMBERS
    momenta = momenta if plan.local_steps == 1 else (0.0,)
    reach = {beta: LARGEST_STEP * plan.local_steps * rounds_with(beta, rounds) for beta in momenta}
    walk = min(farthest, noise / ratio, max(reach.values()))
    momentum = next(beta for beta in momenta if reach[beta] >= walk)
    counted = rounds_with(momentum, rounds)
    share = plan.active / plan.dimension
    scale = 1.0 if plan.clip == "l2" else math.sqrt(plan.active)
    norm = CLIP * math.sqrt(share) if clip_value is None else clip_value * scale
    return {
        "algorithm.server": "momentum" if momentum else "average",
        **({"algorithm.server_options.beta1": momentum} if momentum else {}),
        "algorithm.server_lr": figure(walk / walk_of(counted, plan.local_steps, local_lr, 1.0, share, norm)),
        "algorithm.ema": EMA,
        "privacy.clip_value": figure(norm / scale),
    }


def figure(value: float) -> float:
    """Return the value to three significant digits: no more is known."""
    return float(f"{value:.3g}")


def with_steps(config: Config, records: int) -> Config:
    """Return the config with what it leaves out of batch and steps, for agents of which the smallest holds so many
    records."""
    return (
        _with(config, {"algorithm.batch": records, "algorithm.local_steps": LOCAL_STEPS})
        if _follows(config)
        else config
    )


def with_rates(config: Config, plan: Plan, *, classes: bool) -> Config:
    """Return the config with what it leaves out of rates, average and clip. Where the server's rate is set, its step is
    no average, rates follow a schedule or agents do not take plain steps, all of these stay as they are."""
    algorithm, privacy = config.algorithm, config.privacy
    constant = (algorithm.schedule, algorithm.warmup, algorithm.local_optimizer) == ("constant", 0, "sgd")
    averages = algorithm.server in (None, "average") and constant
    if not _follows(config) or not averages or "server_lr" in algorithm.model_fields_set:
        return config
    given, beta1 = "local_lr" in algorithm.model_fields_set, algorithm.server_options.beta1
    momenta = (0.0, beta1) if "beta1" in algorithm.server_options.model_fields_set else MOMENTA
    found = first_settings(
        plan,
        config.federation.rounds,
        config.federation.per_round,
        algorithm.local_lr if given else 1.0,
        classes=classes,
        clip_value=privacy.clip_value if "clip_value" in privacy.model_fields_set else None,
        momenta=momenta if algorithm.server is None else (0.0,),
    )
    if not given:  # agents that take several steps take short ones, of which the server has the mean
        found = {**found, "algorithm.local_lr": found["algorithm.server_lr"], "algorithm.server_lr": 1.0}
    return _with(config, found)


def chosen(config: Config) -> list[tuple[str, str, str]]:
    """Return the keys that the run chose, with their values and why. Trials have values of their own."""
    values, tried = flat(config), {key for each in config.tuning.candidates or () for key in each}
    whys = {**WHY}
    if "algorithm.server_lr" in config.run.chosen and "algorithm.local_lr" not in config.run.chosen:
        whys["algorithm.server_lr"] = f"makes up for algorithm.local_lr: {WHY['algorithm.local_lr']}"
    return [(key, json.dumps(values[key]), whys[key]) for key in config.run.chosen if key in whys and key not in tried]


def _follows(config: Config) -> bool:
    return algorithm_of(config).mechanism in (GAUSSIAN, DISCRETE_GAUSSIAN)


def _with(config: Config, values: Settings) -> Config:
    """Return the config with those of the values that nobody set; `run.chosen` names their keys."""
    chosen = set()
    for key, value in values.items():
        *sections, name = path = key.split(".")
        if name not in functools.reduce(getattr, sections, config).model_fields_set:
            config = _updated(config, path, value)
            chosen.add(key)
    return _updated(config, ["run", "chosen"], sorted({*config.run.chosen, *chosen})) if chosen else config


def _updated(model: Any, path: Sequence[str], value: object) -> Any:
    """Return a copy of the config, or of a section of it, with the value under the key that `path` names."""
    name, *rest = path
    return model.model_copy(update={name: _updated(getattr(model, name), rest, value) if rest else value})
