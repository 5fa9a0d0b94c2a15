"""Settings for a private run: by arithmetic, by rehearsals that cost nothing, and by trials within the run's budget."""
