"""Stored experience: replay of environment steps."""
