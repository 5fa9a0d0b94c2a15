"""One agent's own side: its ledger, its policy, and what it has sent."""
