"""What releases cost: events, accountants, the cap and the filter behind it. Imports no torch."""
