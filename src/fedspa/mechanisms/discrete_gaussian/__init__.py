"""Discrete Gaussian shares of the noise on a sum over agents: Fed-SPA and DP-Fed under secure aggregation."""
