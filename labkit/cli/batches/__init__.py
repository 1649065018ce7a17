"""`labkit run` over lists of values: every combination of them, as many at a time as the cores have room for."""
