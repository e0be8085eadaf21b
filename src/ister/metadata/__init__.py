"""Small values that have to be right: who owns a topic, which objects it consists of, cursors."""
