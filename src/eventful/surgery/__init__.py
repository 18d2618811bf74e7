"""Foreign models in, converted models out."""
