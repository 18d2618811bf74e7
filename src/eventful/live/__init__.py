"""A local page that shows sources through a model while they run: what `eventful live` is."""
