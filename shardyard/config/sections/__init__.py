"""The sections of the YAML, one module each."""
