"""From a config to a finished run: configuration, set-up, the simulated federation, its files."""
