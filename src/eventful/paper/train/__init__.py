"""Training: ViViT's temporal model on a frozen eventful spatial one, and detectors on video."""
