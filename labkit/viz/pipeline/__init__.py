"""Pictures of pipelines: timelines predicted and measured, layers of stages, traces for Perfetto."""
