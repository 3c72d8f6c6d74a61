"""Answers from a trained model: opened from any folder, asked by an engine, read as text."""
