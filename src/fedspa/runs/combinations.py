"""Which keys of a config go together: config.py allows each by itself, this says what may not stand beside another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedspa.runs.config import Config


def check(config: Config) -> None:
    """Raise a ValueError of one line that names the keys."""
    federation, algorithm, privacy = config.federation, config.algorithm, config.privacy
    if federation.per_round > federation.agents:
        raise ValueError(
            f"federation.per_round is {federation.per_round}; it must not exceed federation.agents = "
            f"{federation.agents}"
        )
    if algorithm.name == "cpsgd":
        _check_cpsgd(config)
        return
    if privacy.trials is not None or privacy.adversary != "local":
        raise ValueError(f"privacy.trials and privacy.adversary belong to cpsgd; {algorithm.name} takes neither")
    if algorithm.name != "fedspa" and algorithm.compression != 1:
        raise ValueError(
            f"algorithm.compression is {algorithm.compression}; {algorithm.name} uploads every coordinate: only 1.0"
        )
    if algorithm.layer_shares is not None and (
        algorithm.name != "fedspa" or algorithm.mask != "fixed" or algorithm.compression != 1
    ):
        raise ValueError(
            "algorithm.layer_shares is for fedspa with algorithm.mask 'fixed', and sets the compression itself: "
            "leave algorithm.compression out"
        )
    if not config.private:
        if algorithm.coding == "int":
            raise ValueError("algorithm.coding is 'int', whose step is a share of the noise; fedavg has none: f32, f16")
        for key, path in (("ledger", config.run.ledger), ("policy", config.run.policy)):
            if path is not None:
                raise ValueError(
                    f"run.{key} is {path!r}; fedavg releases what no ledger can count and no policy allows: leave "
                    f"it out (--set run.{key}=none)"
                )
        return
    if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
        both = "neither" if privacy.epsilon is None else "both"
        raise ValueError(f"privacy.epsilon and privacy.noise_multiplier: {both} given; exactly one must be")
    if privacy.sampling == "fixed" and privacy.neighbours == "add-remove":
        raise ValueError(
            "privacy.neighbours is 'add-remove'; privacy.sampling 'fixed' has a sound accountant under "
            "'replace-one' only"
        )
    if privacy.sampling == "poisson" and privacy.neighbours == "replace-one" and privacy.accountant == "rdp":
        raise ValueError(
            "privacy.accountant is 'rdp'; Poisson sampling under 'replace-one' has a sound accountant in 'pld' only"
        )
    if privacy.accountant == "theorem-1" and privacy.sampling != "fixed":
        raise ValueError("privacy.accountant is 'theorem-1', which assumes privacy.sampling 'fixed'")


def _check_cpsgd(config: Config) -> None:
    """cpSGD is one step a round, of every agent, on batches of a fixed size."""
    federation, algorithm, privacy = config.federation, config.algorithm, config.privacy
    only: tuple[tuple[str, object, object, str], ...] = (
        ("federation.per_round", federation.per_round, federation.agents, "all agents take part in every round"),
        ("algorithm.local_steps", algorithm.local_steps, 1, "one step a round"),
        ("algorithm.coding", algorithm.coding or "int", "int", "whole numbers travel"),
        ("privacy.sampling", privacy.sampling, "fixed", "batches of exactly B records"),
        ("privacy.neighbours", privacy.neighbours or "replace-one", "replace-one", "batches are of a fixed size"),
        ("privacy.clip_rule", privacy.clip_rule, "given", "the levels lie within the clip value"),
        ("privacy.noise_multiplier", privacy.noise_multiplier, None, "its noise is Binomial: give privacy.trials"),
        ("privacy.accountant", privacy.accountant, "pld", "it has an accounting of its own"),
    )
    for key, value, allowed, why in only:
        if value != allowed:
            shown = "unset" if allowed is None else repr(allowed)
            raise ValueError(f"{key} is {value!r}; for cpsgd it must be {shown}: {why}")
    if privacy.clip == "l2" and not algorithm.rotation:
        raise ValueError(
            "privacy.clip is 'l2'; cpsgd without algorithm.rotation needs 'coordinate': its levels span one coordinate"
        )
    given = [
        key
        for key, there in (
            ("privacy.epsilon", privacy.epsilon is not None),
            ("privacy.trials", privacy.trials is not None),
            ("algorithm.compression (below 1)", algorithm.compression < 1),
        )
        if there
    ]
    if len(given) != 1:
        raise ValueError(
            f"cpsgd takes exactly one of privacy.epsilon, privacy.trials and algorithm.compression (below 1); given: "
            f"{', '.join(given) or 'none'}"
        )
