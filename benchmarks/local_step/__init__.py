"""The contenders of `benchmarks/engine.py`: one local step of one agent, ours and theirs."""
