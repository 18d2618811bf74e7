"""How good a model is on data: metrics and the runs that compute them."""
