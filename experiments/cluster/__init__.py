"""Start training on several nodes; see docs/cluster.md."""
