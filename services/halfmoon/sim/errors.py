"""What a simulation refuses."""


class SimError(Exception):
    """The simulation can't be run as asked; the message says why, and what to do."""
