"""Numbers before and after training, each a private release in the agents' ledgers."""
