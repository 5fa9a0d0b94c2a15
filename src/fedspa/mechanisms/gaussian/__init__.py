"""Gaussian noise on sums of clipped gradients: Fed-SPA and DP-Fed."""
