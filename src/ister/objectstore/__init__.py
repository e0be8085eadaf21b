"""Where history lives: objects by key in a bucket or a directory."""
