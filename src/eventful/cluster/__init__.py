"""Many streams on many machines, by Ray: what `eventful cluster` is."""
