"""A model from a video to results: what `eventful run` and `eventful demo` are made of."""
