"""A simulation's agents in worker processes, on this machine or on those of a Ray cluster.

    Simulation ─► Crew (who trains whom, what travels, what is lost) ─► Pool (processes) ─► Worker (an engine each)

The driver pays, draws keys and aggregates, as without workers. A worker gets θ, and its agents' keys and records, and
gives back their payloads. An agent's update depends on its own task only, so it has the same bits wherever it is made.
"""
