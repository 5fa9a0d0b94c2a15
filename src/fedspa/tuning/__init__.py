"""Settings for a private run: by arithmetic, by proxy runs, and by trials within the run's budget."""
