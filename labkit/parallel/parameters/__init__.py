"""Parameters: values that no layout changes, and one record for each parameter."""
