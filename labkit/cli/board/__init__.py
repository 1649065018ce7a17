"""`labkit board`: a page in the room that shows who has solved what, as it happens."""
