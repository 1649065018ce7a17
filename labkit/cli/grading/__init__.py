"""`labkit grade`: scores of a class's copies. Learners' code runs in limited processes of its own."""
