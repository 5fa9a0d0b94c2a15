"""What an agent spent, over all runs, restarts and crashes."""
