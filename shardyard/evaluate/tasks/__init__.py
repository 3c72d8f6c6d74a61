"""Benchmarks under the names that the reference gives them, over local copies of the public sets."""
