"""What an example leaves behind in a module, or outside of it, and in which layer."""
