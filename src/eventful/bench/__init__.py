"""Measuring time: every rule beside the strongest dense path, frame by frame in one run."""
