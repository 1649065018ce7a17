"""Emulated graphs: recorded operations, replayed on the host at fixed addresses."""
