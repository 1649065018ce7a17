"""Parameters: initial values that do not depend on the layout, and one record for each parameter."""
