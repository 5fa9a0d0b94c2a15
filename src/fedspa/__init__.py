"""Federated learning under record-level local differential privacy, with sparse uploads."""
