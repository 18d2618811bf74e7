"""What runs exported graphs: one engine for each runtime."""
