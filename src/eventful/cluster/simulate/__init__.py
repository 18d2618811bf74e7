"""What a cluster would do, computed from measured costs: `eventful cluster simulate`.

`costs` fits times of steps, `fleet` holds cameras, machines and failures, `ticks` runs workers,
`events` says what happens when, `run` puts them together with the placement of a real cluster,
`outcome` and `picture` say what was found.
"""
