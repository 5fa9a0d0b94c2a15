"""A stock Opacus loop that a guard stands before: what it spends is in a ledger before it trains, or it does not train.

All of it is Opacus's own, but for the lines that say `guard`.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedspa

LEDGER = Path("ledger.sqlite")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--noise", type=float, default=1.5)
    given = parser.parse_args()

    if not LEDGER.exists():  # once in the life of these records; in earnest it is a step of its own, not of a script
        fedspa.guard.create(LEDGER)
    guard = fedspa.guard.open(LEDGER, agent="digits", epsilon=2.5, delta=1e-4)

    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]
    model: nn.Module = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(train_x, train_y), batch_size=70)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus says that its noise is not secure; so do guard and ledger
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=given.noise, max_grad_norm=1.0
        )
    guard.optimizer(optimizer, loader, epochs=given.epochs)

    for epoch in range(given.epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
        print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}")
    print(guard)


if __name__ == "__main__":
    try:
        main()
    except fedspa.FedspaError as error:
        raise SystemExit(f"refused: {error}") from None
