"""Records: where they come from, who holds them, who takes part."""
