"""Ray: how it is started on this machine or joined on a cluster, and actors that come up again."""
