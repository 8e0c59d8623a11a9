"""The noise in Triton kernels, for CUDA: eager launches, and operators that the compiler can inline."""
