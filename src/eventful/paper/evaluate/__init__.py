"""Evaluation on data: metrics, and the runs that compute them."""
