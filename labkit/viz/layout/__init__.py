"""Pictures of layouts: the ranks of each group, and the bytes that groups send between nodes."""
