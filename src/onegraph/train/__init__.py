"""Training: the only place where the parts meet."""
