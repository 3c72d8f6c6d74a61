"""Expert parallelism: where experts live, how tokens reach them, and what their routers are told."""
