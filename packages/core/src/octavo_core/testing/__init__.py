"""Conformance suites of the seams and the smallest legal implementation of each. Needs the extra `jax`."""
