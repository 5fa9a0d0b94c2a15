"""What is learned: models, and a module as a function of its parameters."""
