"""Dispatch: bring tokens to the ranks of their experts, and the results back."""
