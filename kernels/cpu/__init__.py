"""C++ kernels for CPUs: compiled at first use (or when an image is built), loaded with ctypes. See docs/engine.md."""
