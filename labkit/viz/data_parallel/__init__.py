"""Pictures of data parallelism: gradient buckets, owners of slices, communication behind computation."""
