"""One agent's side of a round: its policy, its ledger, its training, and what it has sent."""
