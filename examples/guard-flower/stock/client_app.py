"""A stock Flower client: logistic regression by noisy gradient descent on all of a site's records, in NumPy."""

from __future__ import annotations

import secrets

import numpy as np
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedspa

STEPS, NOISE, CLIP, RATE = 5, 12.0, 1.0, 0.02
# What one answer does to a site's records, in dp_accounting's words: five sums of clipped gradients, with noise.
EVENT = SelfComposedDpEvent(GaussianDpEvent(NOISE), STEPS)

# The one line of the guard. Its noise is `seeded`, since NumPy's generator is no cryptographic one.
app = ClientApp(mods=[fedspa.guard.flower_mod(EVENT, rounds=5, noise="seeded")])


@app.train()
def train(message: Message, context: Context) -> Message:
    x, y = records(context)
    (weights,) = message.content.array_records["arrays"].to_numpy_ndarrays()
    noise = np.random.Generator(np.random.PCG64(secrets.randbits(128)))
    for _ in range(STEPS):
        errors = 1 / (1 + np.exp(-x @ weights)) - y
        gradients = errors[:, None] * x
        gradients /= np.maximum(1, np.linalg.norm(gradients, axis=1) / CLIP)[:, None]
        weights = weights - RATE * (gradients.sum(0) + NOISE * CLIP * noise.standard_normal(weights.size))
    # The mean error is not private, and nothing paid for it: the mod takes it out.
    metrics = MetricRecord({"num-examples": len(x), "error": float(np.abs(errors).mean())})
    return Message(RecordDict({"arrays": ArrayRecord([weights]), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    x, y = records(context)
    (weights,) = message.content.array_records["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({"num-examples": len(x), "accuracy": float(((x @ weights > 0) == y).mean())})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def records(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """500 records of a site, made up."""
    drawn = np.random.default_rng(int(context.node_config["partition-id"]))
    x = drawn.standard_normal((500, 4))
    return x, (x @ np.array([1.0, -2.0, 0.5, 0.0]) + drawn.standard_normal(500) > 0).astype(float)
