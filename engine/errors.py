"""What the outside can get wrong about an engine."""


class ModelError(ValueError):
    """The model cannot be found, or its files are missing, broken or not supported. Names the file, key and value."""


class DeviceError(ValueError):
    """The device asked for is not there, or its memory does not hold what was asked for."""
