"""What can be saved by knowing which blocks of a frame a codec copied unchanged."""
