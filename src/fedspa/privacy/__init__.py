"""What a run promises and what it costs: plans, accountants, calibration, ledgers, policies. Imports no torch."""
