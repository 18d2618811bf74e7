"""The default settings on a user's video: what it costs, how long it takes, how far it is off.

`measure` runs one clip. Frames are read and stepped one after the other, as a user does it. The
dense model, the default, other configs, and frame skipping at equal cost are compared.
"""
