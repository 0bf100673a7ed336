"""Attention kernels: tensors in, tensors out. They import nothing from the package but each other."""
