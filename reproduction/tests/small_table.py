"""A table of runs that take a fraction of a second: the algorithms of the paper on digits."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
[federation]
agents = 6
rounds = {rounds}
per_round = 3
[algorithm]
local_steps = 2
batch = 10
local_lr = 0.5
[privacy]
epsilon = 4.0
noise = "seeded"
clip_value = 0.3
[run]
engine = "generic"
threads = 1
"""

TABLE = """
title = "Small"
data = "digits"
quick = ["federation.rounds=1"]
stand_in = "reproduction.stand_in:mnist"
curve = "base.toml"

[[row]]
algorithm = "fedspa"
compression = 0.2
printed = { accuracy = 92.65, cost = 0.0197, epsilon = 1.0 }
published = { config = "base.toml", set = ["algorithm.compression=0.2", "privacy.sampling=fixed", \
"privacy.noise_multiplier=6.0", "privacy.epsilon=none", "privacy.clip=coordinate", "privacy.clip_value=0.01"] }
verified = { config = "base.toml", set = ["algorithm.compression=0.2"] }

[[row]]
algorithm = "dp-fed"
compression = 1.0
printed = { diverged = true }
verified = { config = "base.toml", set = ["algorithm.name=dp-fed"] }

[[row]]
algorithm = "fedavg"
compression = 1.0
printed = { accuracy = 96.87, cost = 0.3931 }
published = { config = "base.toml", set = ["algorithm.name=fedavg"] }
"""


def write(folder: Path, rounds: int = 2) -> Path:
    (folder / "base.toml").write_text(CONFIG.format(rounds=rounds))
    path = folder / "small.toml"
    path.write_text(TABLE)
    return path
