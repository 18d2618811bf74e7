"""Models by name: the one place that turns what a user names into a model, for all commands."""
