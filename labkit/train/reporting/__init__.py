"""Records of a run: timers, metrics, rates, progress, its folder, and costs from measured Events."""
