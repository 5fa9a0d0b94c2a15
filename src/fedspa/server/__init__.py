"""The server's half: exact aggregation of sparse updates, and the step that turns their mean into a new θ."""
