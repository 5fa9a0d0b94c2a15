"""A stock Flower server: FedAvg, which knows nothing of the guard."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    trained(grid, int(context.run_config["rounds"]))


def trained(grid: Grid, rounds: int) -> Result:
    return FedAvg().start(grid, initial_arrays=ArrayRecord([np.zeros(4)]), num_rounds=rounds)
