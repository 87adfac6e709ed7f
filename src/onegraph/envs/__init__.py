"""Environments as named numpy arrays: one task name in, `N` streams of checked rows out. No torch is imported here."""
