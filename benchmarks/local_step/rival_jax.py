"""The same step in jax_privacy: a chain of convolutions, poolings and linear layers, jitted as a whole.

The layers of a torch module are translated one by one, so that the model is the same; a module that is no such chain is
refused. `pip install jax jax-privacy==2.0.0` adds what this needs; it is no dependency.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from fedspa.examples import tensors
from local_step.cases import CLIP, LEARNING_RATE, NOISE, Case

Parameters = list[dict[str, Any]]


class JaxRun:
    """Takes that many steps when called; returns their number. jax_privacy has no masks: p = 1."""

    def __init__(self, case: Case, seed: int) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some of the GPU's memory, too
        import jax
        import jax.numpy as jnp
        import jax_privacy
        import optax
        from jax_privacy import noise_addition

        if (jax.default_backend() == "gpu") != (case.device != "cpu"):
            raise ValueError(f"JAX runs on {jax.default_backend()} here, not on {case.device}")
        forward, parameters = translated(case.row.build())
        x, y = (jnp.asarray(part.numpy()) for part in tensors(*case.row.examples(case.records, seed)))
        rate = LEARNING_RATE / case.batch

        def loss(parameters: Parameters, x: Any, y: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(forward(parameters, x), y).sum()

        gradient = jax_privacy.clipped_grad(loss, l2_clip_norm=CLIP["l2"], batch_argnums=(1, 2))
        privatizer = noise_addition.gaussian_privatizer(stddev=NOISE * CLIP["l2"], prng_key=jax.random.key(seed))

        def step(parameters: Parameters, state: Any, key: Any) -> tuple[Parameters, Any, Any]:
            key, drawn = jax.random.split(key)
            index = jax.random.randint(drawn, (case.batch,), 0, case.records)
            noisy, state = privatizer.update(gradient(parameters, x[index], y[index]), state)
            return jax.tree.map(lambda p, g: p - rate * g, parameters, noisy), state, key

        self._step, self._wait = jax.jit(step, donate_argnums=(0, 1)), jax.block_until_ready
        self._held = parameters, privatizer.init(parameters), jax.random.key(seed + 1)

    def __call__(self, steps: int) -> int:
        for _ in range(steps):
            self._held = self._step(*self._held)
        self._wait(self._held)  # a call of JAX returns before its work is done
        return steps


def translated(module: nn.Module) -> tuple[Callable[[Parameters, Any], Any], Parameters]:
    """Return the module as a function of its parameters and a batch, and the parameters."""
    import jax
    import jax.numpy as jnp

    layers: list[Callable[[dict[str, Any], Any], Any]] = []
    parameters: Parameters = []

    def convolution(layer: nn.Conv2d) -> Callable[[dict[str, Any], Any], Any]:
        if layer.stride != (1, 1) or layer.padding != (0, 0) or layer.groups != 1:
            raise ValueError("chains of CNN layers without stride, padding or groups are translated")
        return lambda p, x: (
            jax.lax.conv_general_dilated(x, p["weight"], (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))
            + p["bias"][:, None, None]
        )

    def pooling(p: dict[str, Any], x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    for layer in module.children():
        match layer:
            case nn.Conv2d():
                layers.append(convolution(layer))
            case nn.Linear():
                layers.append(lambda p, x: x @ p["weight"].T + p["bias"])
            case nn.MaxPool2d(kernel_size=2):
                layers.append(pooling)
            case nn.ReLU():
                layers.append(lambda p, x: jax.nn.relu(x))
            case nn.Flatten():
                layers.append(lambda p, x: x.reshape(len(x), -1))
            case _:
                raise ValueError(f"no translation of {type(layer).__name__}: chains of CNN layers are translated")
        parameters.append({name: jnp.asarray(p.detach().cpu().numpy()) for name, p in layer.named_parameters()})
    if not layers:
        raise ValueError(f"{type(module).__name__} is no chain of layers: chains of CNN layers are translated")

    def forward(parameters: Parameters, x: Any) -> Any:
        for apply, own in zip(layers, parameters):
            x = apply(own, x)
        return x

    return forward, parameters
