"""Below the collectives: who shares which communicator, how gloo and NCCL carry each exchange, what is under way."""
