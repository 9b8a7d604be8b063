"""What the outside can get wrong about an engine."""


class ModelError(ValueError):
    """The model's files are missing, broken or not supported. The message names the file, the key and the value."""


class DeviceError(ValueError):
    """The device asked for is not there, or its memory does not hold what was asked for."""
