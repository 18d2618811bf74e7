"""Measures time: every update rule and the fastest dense path, frame by frame in one run."""
