"""Recognises transformer blocks by their structure, and proves the description on random tokens."""
