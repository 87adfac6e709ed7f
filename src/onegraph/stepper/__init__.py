"""Runs the optimization step of any learner; knows no algorithm."""
