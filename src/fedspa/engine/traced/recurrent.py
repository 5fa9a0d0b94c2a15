"""Recurrent layers as plain operations, one time step after the other: torch's own kernels cannot be mapped over
examples. The signatures are those of `torch._VF`; the arithmetic is that of the documentation of `nn.LSTM`, `nn.GRU`
and `nn.RNN`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# A step of a layer is some sixty operations of the program, with its way back. Above this, tracing takes minutes.
MOST_STEPS = 256

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Sequence[Tensor | None]], State]


def lstm(x: Tensor, hx: Sequence[Tensor], weights: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs and the last hidden and cell states of an `nn.LSTM`."""
    outputs, (h, c) = _layers(_lstm_cell, x, hx, weights, *options)
    return outputs, h, c


def gru(x: Tensor, hx: Tensor, weights: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last hidden states of an `nn.GRU`."""
    outputs, (h,) = _layers(_gru_cell, x, [hx], weights, *options)
    return outputs, h


def rnn_tanh(x: Tensor, hx: Tensor, weights: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last hidden states of an `nn.RNN` with tanh."""
    outputs, (h,) = _layers(_plain_cell(torch.tanh), x, [hx], weights, *options)
    return outputs, h


def rnn_relu(x: Tensor, hx: Tensor, weights: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last hidden states of an `nn.RNN` with ReLU."""
    outputs, (h,) = _layers(_plain_cell(torch.relu), x, [hx], weights, *options)
    return outputs, h


def lstm_cell(x: Tensor, hx: State, w_ih: Tensor, w_hh: Tensor, *biases: Tensor) -> State:
    """Return the hidden and cell states of an `nn.LSTMCell`."""
    return _one_step(_lstm_cell, x, hx, w_ih, w_hh, *biases)


def gru_cell(x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Tensor) -> Tensor:
    """Return the hidden state of an `nn.GRUCell`."""
    return _one_step(_gru_cell, x, (hx,), w_ih, w_hh, *biases)[0]


def _one_step(
    cell: Cell,
    x: Tensor,
    state: State,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> State:
    return cell(functional.linear(x, w_ih, b_ih), tuple(state), [w_ih, w_hh, b_ih, b_hh, None])


def _layers(
    cell: Cell,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, State]:
    directions = 2 if bidirectional else 1
    x = x.transpose(0, 1) if batch_first else x
    if layers * directions * len(x) > MOST_STEPS:
        raise ValueError(f"a recurrent layer of more than {MOST_STEPS} steps in all")
    each = len(weights) // (layers * directions)
    last: list[State] = []
    for layer in range(layers):
        if layer and dropout:
            x = functional.dropout(x, dropout, training)
        passes = []
        for direction in range(directions):
            number = layer * directions + direction
            own = weights[number * each : (number + 1) * each]
            outputs, state = _steps(cell, x, tuple(held[number] for held in states), _named(own, bias), direction == 1)
            passes.append(outputs)
            last.append(state)
        x = torch.cat(passes, -1)
    return x.transpose(0, 1) if batch_first else x, tuple(torch.stack(each) for each in zip(*last))


def _named(weights: Sequence[Tensor], bias: bool) -> list[Tensor | None]:
    """Return input weight, hidden weight, both biases and the projection; None for what a layer lacks."""
    biases = weights[2:4] if bias else (None, None)
    projection = weights[4 if bias else 2 :]
    return [*weights[:2], *biases, *(projection or (None,))]


def _steps(
    cell: Cell, x: Tensor, state: State, weights: Sequence[Tensor | None], backwards: bool
) -> tuple[Tensor, State]:
    inputs = functional.linear(x, weights[0], weights[2])  # type: ignore[arg-type]
    outputs = []
    for step in _in_order(inputs.unbind(0), backwards):
        state = cell(step, state, weights)
        outputs.append(state[0])
    return torch.stack([*_in_order(outputs, backwards)]), state


def _in_order(steps: Sequence[Tensor], backwards: bool) -> Iterator[Tensor]:
    return reversed(steps) if backwards else iter(steps)


def _lstm_cell(step: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    h, c = state
    i, f, g, o = (step + functional.linear(h, weights[1], weights[3])).chunk(4, -1)  # type: ignore[arg-type]
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if weights[4] is None else functional.linear(h, weights[4])), c


def _gru_cell(step: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    (h,) = state
    r, z, n = step.chunk(3, -1)
    hidden_r, hidden_z, hidden_n = functional.linear(h, weights[1], weights[3]).chunk(3, -1)  # type: ignore[arg-type]
    r, z = (r + hidden_r).sigmoid(), (z + hidden_z).sigmoid()
    n = (n + r * hidden_n).tanh()
    return (n + z * (h - n),)


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(step: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
        return (activation(step + functional.linear(state[0], weights[1], weights[3])),)  # type: ignore[arg-type]

    return cell


# By the names of `torch._VF`.
RULES = (lstm, gru, rnn_tanh, rnn_relu, lstm_cell, gru_cell)
