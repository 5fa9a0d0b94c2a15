"""The plain operations of a recurrent layer make what torch's own kernels make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspa.engine.traced import recurrent

LAYERS = {
    "LSTM": (recurrent.lstm, nn.LSTM, {}),
    "LSTM with a projection": (recurrent.lstm, nn.LSTM, {"proj_size": 2}),
    "GRU": (recurrent.gru, nn.GRU, {}),
    "tanh": (recurrent.rnn_tanh, nn.RNN, {}),
    "ReLU": (recurrent.rnn_relu, nn.RNN, {"nonlinearity": "relu"}),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_layer_is_torchs(name: str, bias: bool, layers: int, both: bool, batch_first: bool) -> None:
    rule, kind, options = LAYERS[name]
    torch.manual_seed(1)
    layer: Any = kind(3, 5, layers, bias=bias, batch_first=batch_first, bidirectional=both, **options)
    x = torch.randn(4, 6, 3, requires_grad=True)
    batch = 4 if batch_first else 6
    sizes = (options["proj_size"], 5) if "proj_size" in options else (5,) * (2 if kind is nn.LSTM else 1)
    state = tuple(torch.randn(layers * (1 + both), batch, size) for size in sizes)
    hx: Any = state if kind is nn.LSTM else state[0]
    outputs, last = layer(x, hx)
    wanted = [outputs, *(last if kind is nn.LSTM else (last,))]
    found = rule(x, hx, layer._flat_weights, bias, layers, 0.0, False, both, batch_first)
    assert_same(found, wanted, [x, *layer.parameters()])


@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_is_torchs(bias: bool) -> None:
    torch.manual_seed(1)
    x, h, c = torch.randn(4, 3, requires_grad=True), torch.randn(4, 5), torch.randn(4, 5)
    lstm, gru = nn.LSTMCell(3, 5, bias=bias), nn.GRUCell(3, 5, bias=bias)
    assert_same(recurrent.lstm_cell(x, (h, c), *lstm.parameters()), lstm(x, (h, c)), [x, *lstm.parameters()])
    assert_same([recurrent.gru_cell(x, h, *gru.parameters())], [gru(x, h)], [x, *gru.parameters()])


def assert_same(found: Any, wanted: Any, inputs: list[Tensor]) -> None:
    """Both values and gradients."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    gradients = (
        torch.autograd.grad(sum(part.square().sum() for part in parts), inputs, retain_graph=True)
        for parts in (found, wanted)
    )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
