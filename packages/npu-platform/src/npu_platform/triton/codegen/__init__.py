"""C++ from TTIR: a function a kernel, run once a program of the grid, with loops over arrays where TTIR has tensors."""
