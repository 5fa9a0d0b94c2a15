"""Local training: from θ and an agent's records to its update, by interchangeable back ends."""
