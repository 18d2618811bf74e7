"""Reads and writes video, and draws updates."""
