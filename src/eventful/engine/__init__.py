"""Frames one after another through a converted model, on any device."""
