"""Runs of `eventful cluster` on this machine: faults, a soak, and how it scales."""
