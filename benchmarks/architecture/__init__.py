"""Makes docs/architecture.md from the imports and from traces."""
