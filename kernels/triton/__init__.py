"""Triton kernels for CUDA, and the backend on them. Import nothing here where `triton` is not installed.

Modules of kernels only (`paged`, `decode`, `prefill`, `row`, `heads`, `lottery`, `floors`, `steps`, `skinny`) import
nothing but triton; `docs/gpu.md` says what each is bounded by, and how it is checked without a GPU.
"""
