"""The update rules: one block in one frame, written once for every device."""
