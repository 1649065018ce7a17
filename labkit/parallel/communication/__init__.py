"""Below the collectives: communicators that layouts share, algorithms on gloo and NCCL, transfers under way."""
