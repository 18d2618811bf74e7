"""What each setting would cost and lose on a user's camera, and which one to take.

`measure` runs settings side by side on clips, `choose` finds the cheapest within given limits,
`report` and `policy_file` write what was found.
"""
