"""An OpenAI-compatible HTTP service over an engine."""
