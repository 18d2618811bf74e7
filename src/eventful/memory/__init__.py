"""What one video remembers between frames, and how that is written to a file."""
