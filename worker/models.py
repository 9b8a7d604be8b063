"""From the name of a model to its files on this machine."""


class ModelError(ValueError):
    """A model that cannot be found, or whose files are missing or wrong. The message names the file and the value."""
