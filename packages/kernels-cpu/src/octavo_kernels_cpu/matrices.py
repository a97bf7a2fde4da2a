"""Packed matrices by themselves: for tests, benches and whoever builds other layers."""

from octavo_kernels_cpu._src.matrix import Format, Matrix, Raw, Source, score

__all__ = ["Format", "Matrix", "Raw", "Source", "score"]
