"""Tokens: where they lie in the picture, and which of them are selected."""
