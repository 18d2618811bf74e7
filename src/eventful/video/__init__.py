"""Video ends: where frames come from and how updates are shown."""
